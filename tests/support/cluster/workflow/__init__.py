"""What the template of a workflow says, as propeller reads it: bindings, branches, order, and keys of the cache."""
