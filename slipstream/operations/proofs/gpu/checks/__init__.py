"""Checks by subject. Every check runs in a process, on one device or on all."""
