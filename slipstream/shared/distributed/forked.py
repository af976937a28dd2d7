"""First module of a fork server; see :mod:`slipstream.shared.distributed.fork_server`.

It ends the server with the process that started it. The server would not detect that process's end by its pipe, which
its children keep open.
"""

from __future__ import annotations

import os

from slipstream.shared.distributed.child_processes import end_with_parent

# c10d logs long warnings about lost peers, which this project reports in one line. torch reads this when it is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
#: Environment of the server at its start.
ENVIRONMENT = dict(os.environ)

end_with_parent()
