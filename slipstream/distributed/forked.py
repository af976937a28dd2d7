"""First module of a fork server; see :mod:`slipstream.distributed.fork_server`.

It ends the server with the process that started it, whose end the server would not notice: its children hold the other
end of the pipe.
"""

from __future__ import annotations

import os

from slipstream.distributed.child_processes import end_with_parent

# c10d warns at length of lost peers, which this project reports in one line. Read when torch is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
#: Environment of the server.
ENVIRONMENT = dict(os.environ)

end_with_parent()
