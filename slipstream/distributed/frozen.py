"""Last module of the fork server: excludes all loaded objects from the garbage collection of its children.

A collection writes to every object that it visits, and every written memory page is copied: otherwise a process takes
90 MB more.
"""

import gc

gc.collect()
gc.freeze()
