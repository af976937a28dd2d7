"""Last module of the fork server: excludes all loaded objects from its children's garbage collection.

A collection writes to every object that it visits, and written pages are copied: 90 MB per process.
"""

import gc

gc.collect()
gc.freeze()
