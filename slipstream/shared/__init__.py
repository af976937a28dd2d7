"""Packages that stages and operations share."""
