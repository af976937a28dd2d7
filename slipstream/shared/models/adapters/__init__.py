"""Low-rank adapters (LoRA) for a transformer's frozen linear layers, optionally quantised to four bits."""
