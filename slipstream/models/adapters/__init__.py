"""Low-rank adapters for a transformer's frozen linear layers, whose weights may be stored in four bits."""
