"""Objects of several parts."""

import hashlib
import random
from pathlib import Path

from slipstream.shared.storage import Storage, s3

#: Enough for several parts, each with its own content, the last one short.
LARGE = random.Random(1).randbytes(2 * s3.PART_BYTES + 12345)


def put_file(storage: Storage, key: str, data: bytes) -> Path:
    source = storage.scratch() / f"{hashlib.sha256(storage.base.encode()).hexdigest()[:12]}-source"
    source.write_bytes(data)
    storage.put(key, source)
    return source
