"""Capturing what native code writes, in fixtures of any scope."""

from __future__ import annotations

import os
import sys
import tempfile
from types import TracebackType

import pytest


class Captured:
    """Everything written to the descriptors 1 and 2 inside the ``with`` block, in ``text`` afterwards."""

    text = ""

    def __enter__(self) -> Captured:
        sys.stdout.flush()
        sys.stderr.flush()
        self._file = tempfile.TemporaryFile()
        self._kept = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(self._file.fileno(), descriptor)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)
        self._file.seek(0)
        self.text = self._file.read().decode()
        self._file.close()


@pytest.fixture(scope="module")
def capture_descriptors() -> Captured:
    return Captured()
