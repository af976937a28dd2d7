"""flytekit's description of a dataclass, made once.

For every mention of a dataclass in the signature of a task or workflow flytekit 1.16 builds its JSON schema anew, and
mashumaro a class for each default in it. Importing the workflows of this project took 15 s, of which 13 were this.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flytekit.core.type_engine import DataclassTransformer
from flytekit.models.types import LiteralType


def describe_once() -> None:
    """From now on, in this process. A description depends on nothing but the type, and nobody changes one."""
    anew = DataclassTransformer.get_literal_type
    remembered = cache(anew)

    def get_literal_type(transformer: DataclassTransformer, of: Any) -> LiteralType:
        try:
            hash(of)
        except TypeError:  # annotated by a dictionary or the like
            return anew(transformer, of)
        return remembered(transformer, of)

    DataclassTransformer.get_literal_type = get_literal_type
