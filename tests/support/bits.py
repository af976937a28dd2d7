"""Equality to the bit."""

import struct
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pyarrow as pa


def bits(value: Any) -> Any:
    """What two values share only if they are of the same types with the same bits."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, pa.RecordBatch):
        return str(value.schema), [bits(column.to_pylist()) for column in value.columns]
    if isinstance(value, dict):
        return dict, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    if is_dataclass(value):
        return type(value), [bits(getattr(value, one.name)) for one in fields(value)]
    return type(value), value
