"""flytekit's description of a dataclass, made once.

For every mention of a dataclass in the signature of a task or workflow flytekit 1.16 builds its JSON schema anew, and
mashumaro a class for each default in it. Importing the workflows of this project took 15 s, of which 13 were this.
"""

from __future__ import annotations

from functools import cache

from flytekit.core.type_engine import DataclassTransformer


def describe_once() -> None:
    """From now on, in this process. A description depends on nothing but the type, and nobody changes one."""
    if not hasattr(DataclassTransformer.get_literal_type, "cache_info"):
        DataclassTransformer.get_literal_type = cache(DataclassTransformer.get_literal_type)
