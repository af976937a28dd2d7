from __future__ import annotations

from tests.storage.conftest import server, store  # noqa: F401  (fixtures)
