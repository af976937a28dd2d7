"""Loaded last by the fork server: keeps the garbage collector of the processes forked from it off what it has loaded.

A collection writes to every object that it looks at, and each memory page that is written to is copied: without this a
process takes 90 MB more.
"""

import gc

gc.collect()
gc.freeze()
