"""Low-rank adapters beside a transformer's frozen linear layers, whose weights may be held in four bits."""
