"""Shared parts of all benchmarks: the command line, tables, turns and fresh processes."""
