"""Storage: the same few operations on a local directory and on an S3 prefix."""

from tasks.storage.base import S3, AlreadyThere, MissingObject, ObjectInfo, Storage, StorageUnavailable
from tasks.storage.local import cannot_write
from tasks.storage.open import copy_within_s3, download_all, list_objects, open_listed, open_reader, storage_for

__all__ = [
    "S3",
    "AlreadyThere",
    "MissingObject",
    "ObjectInfo",
    "Storage",
    "StorageUnavailable",
    "cannot_write",
    "copy_within_s3",
    "download_all",
    "list_objects",
    "open_listed",
    "open_reader",
    "storage_for",
]
