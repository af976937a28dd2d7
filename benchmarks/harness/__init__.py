"""What all benchmarks share: the command line, tables, turns and fresh processes. Each benchmark only measures."""
