"""Workflow templates as propeller reads them: bindings, branches, order, and cache keys."""
