"""Captured output of Python, native code and child processes, as one text in the order of writing."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from types import TracebackType


class Captured:
    """Everything written to the descriptors 1 and 2 inside the ``with`` block, in ``text`` afterwards.

    ``sys.stdout`` and ``sys.stderr`` are made to write there too: pytest lets them go elsewhere.
    """

    text = ""

    def __enter__(self) -> Captured:
        self._file = tempfile.TemporaryFile()
        with contextlib.ExitStack() as stack:
            for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
                stream.flush()
                kept = os.dup(descriptor)
                stack.callback(os.close, kept)
                stack.callback(os.dup2, kept, descriptor)
                os.dup2(self._file.fileno(), descriptor)
            out = stack.enter_context(open(1, "w", buffering=1, encoding="utf-8", closefd=False))
            err = stack.enter_context(open(2, "w", buffering=1, encoding="utf-8", closefd=False))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            self._undo = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()
        self._file.seek(0)
        self.text = self._file.read().decode(errors="replace")
        self._file.close()
