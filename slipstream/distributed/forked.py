"""What a fork server loads first; see :mod:`slipstream.distributed.fork_server`.

It ends with the process that started it. By itself it would not notice its end, as what was forked from it holds the
other end of the pipe by which it would.
"""

from __future__ import annotations

import os

from slipstream.distributed.child_processes import end_with_parent

# c10d warns at length of peers that went away, of which there is one line from here. Read when torch is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
#: The server's.
ENVIRONMENT = dict(os.environ)

end_with_parent()
