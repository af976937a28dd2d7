"""Conditional writes: of several writers of a key, exactly one succeeds.

The store must honour the condition of a write: ``If-None-Match: *`` on S3 and Azure, ``ifGenerationMatch=0`` on Google.
A store that ignores it answers 200 to all writers. So a process writes the first object that it creates in a bucket
twice; the second write must be refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from slipstream.shared.errors import UserError
from slipstream.shared.storage.base import AlreadyThere, Storage, StorageUnavailable

#: Buckets that have refused to overwrite an existing key in this process.
HONOURING: set[str] = set()


class ConditionIgnored(UserError):
    """Error for a store that overwrites an object despite the condition."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: the store replaced an existing object although the write was conditional, so two runs could "
            "take the same number; expected a store that honours conditional writes; use another one, and check it "
            f"with slipstream doctor --node --store {where}"
        )


@dataclass(frozen=True)
class ConditionalWrite:
    """Conditional write of one object."""

    uri: str
    #: Writes the object with the condition; raises ``AlreadyThere`` if the store refuses it.
    write: Callable[[], object]
    #: Returns True if the stored bytes are those of ``write``.
    is_ours: Callable[[], bool]
    delete: Callable[[], object]

    @property
    def bucket(self) -> str:
        scheme, _, rest = self.uri.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    def run(self, *, exactly_one: bool) -> None:
        """Create the object; raises as :meth:`slipstream.shared.storage.base.Storage.create`."""
        try:
            self.write()
        except AlreadyThere:
            HONOURING.add(self.bucket)
            # If the answer to the first try was lost, the second try finds the object of the first.
            if not self.is_ours():
                raise
            return
        if exactly_one and self.bucket not in HONOURING:
            self._write_again()
        if not self.is_ours():
            raise StorageUnavailable(f"{self.uri}: the stored bytes differ from those sent")

    def _write_again(self) -> None:
        """Raise :class:`ConditionIgnored` unless the store refuses a second write."""
        try:
            self.write()
        except AlreadyThere:
            HONOURING.add(self.bucket)
            return
        with suppress(UserError, StorageUnavailable):
            self.delete()
        raise ConditionIgnored(self.bucket)


def check_conditional_writes(storage: Storage) -> None:
    """Create a temporary object twice; raise :class:`ConditionIgnored` unless the second time is refused."""
    key = f"probe-{uuid.uuid4().hex}"
    try:
        storage.create(key, b"first", exactly_one=False)
        storage.create(key, b"second", exactly_one=False)
    except AlreadyThere:
        return
    finally:
        with suppress(UserError, StorageUnavailable):
            storage.delete([key])
    raise ConditionIgnored(storage.base)
