"""Last module of the fork server: excludes all loaded objects from its children's garbage collection.

A collection writes to every object that it visits, and every child would copy the written pages: 90 MB.
"""

import gc

gc.collect()
gc.freeze()
