"""Flyte tasks, one module per stage; each calls an engine of :mod:`slipstream`."""
