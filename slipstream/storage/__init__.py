"""Storage: the same few operations on a local directory and on a prefix of S3, Google's or Azure's store."""

from slipstream.storage.base import S3, STORES, AlreadyThere, MissingObject, ObjectInfo, Storage, StorageUnavailable
from slipstream.storage.local import cannot_write
from slipstream.storage.names import check_name, path_below
from slipstream.storage.open import (
    copy_within_s3,
    download_all,
    list_names,
    list_objects,
    open_listed,
    open_reader,
    read_range,
    stat_object,
    storage_for,
)

__all__ = [
    "S3",
    "STORES",
    "AlreadyThere",
    "MissingObject",
    "ObjectInfo",
    "Storage",
    "StorageUnavailable",
    "cannot_write",
    "check_name",
    "copy_within_s3",
    "download_all",
    "list_names",
    "list_objects",
    "open_listed",
    "open_reader",
    "path_below",
    "read_range",
    "stat_object",
    "storage_for",
]
