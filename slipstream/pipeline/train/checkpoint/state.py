"""Training state in checkpoints: model, optimiser, other stateful objects, and random generators.

Parameters are keyed by name. Model and optimiser state equal the results of torch's ``get_model_state_dict`` and
``get_optimizer_state_dict``.

State dictionaries mix tensors with numbers, text, tuples and dictionaries with integer keys. Checkpoints hold no
pickles: :func:`split_tensors` separates the tensors, named by their paths, from a JSON-serialisable tree;
:func:`join_tensors` is its inverse.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from slipstream.shared.models.factory import Predictor

#: As in torch: names to tensors, numbers, text and nested dictionaries.
StateDict = dict[str, Any]
#: Path of a value as a linked list: (path of the enclosing container, key); ``()`` at the top.
KeyPath = tuple[Any, ...]


class Stateful(Protocol):
    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


@dataclass(frozen=True)
class AppState:
    """Objects whose state is saved; ``parts`` are scheduler, scaler, EMA and others, by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful] = field(default_factory=dict)

    def state_dict(self) -> StateDict:
        return {
            "model": own_state(unwrapped(self.model)),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Load all state except the model's tensors, which the restore has already filled in place."""
        # Not strict: a parameter that had no gradient yet has no state.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state["optimizer"], options=options)
        for name, parameter in unwrapped(self.model).named_parameters():
            if name not in state["optimizer"]["state"]:
                self.optimizer.state.pop(parameter, None)
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])

    def initialize(self) -> Callable[[], None]:
        """Create the optimiser's state tensors without taking a step, if there are none yet.

        Returns a function that removes them, to call before training from scratch: otherwise step counters would start
        at 1.
        """
        if self.optimizer.state:
            return lambda: None
        get_optimizer_state_dict(self.model, self.optimizer)
        # Looks the state up late, because loading replaces the dictionary.
        return lambda: self.optimizer.state.clear()


def own_state(model: nn.Module) -> StateDict:
    """Return the model's state dictionary without frozen tensors of its base."""
    return model.own_state() if isinstance(model, Predictor) else model.state_dict()


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """Return the optimiser's state dictionary, with parameter names instead of indices."""
    # ``get_optimizer_state_dict`` resolves every name through all wrappers of the model, which took 2.6 ms for a
    # transformer of 24 layers, a third of a save's stall. The only wrapper here is DDP, which is removed at once.
    names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(model).named_parameters()}
    return {
        "state": {names[parameter]: dict(state) for parameter, state in optimizer.state.items()},
        "param_groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ],
    }


def split_tensors(value: object) -> tuple[object, dict[str, Tensor]]:
    """Split ``value`` into a JSON-serialisable tree and its tensors by name.

    Raises ``TypeError`` with the path of a value that is neither a tensor nor JSON-serialisable.
    """
    tensors: dict[str, Tensor] = {}
    return encode(value, (), tensors), tensors


def encode(value: object, path: KeyPath, tensors: dict[str, Tensor]) -> object:
    # The most frequent type first: a history has thousands of numbers, and the step loop waits.
    if isinstance(value, float):
        # JSON has no infinity and no NaN. Finite numbers keep all their bits.
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, (path, key), tensors) for key, item in value.items()}
        return {"$items": [[encode(k, path, tensors), encode(v, (path, k), tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [encode(item, (path, i), tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Tensor):
        name = path_text(path)
        tensors[name] = value
        return {"$tensor": name}
    kind = type(value).__name__
    raise TypeError(f"{path_text(path)}: a {kind} cannot be kept in a checkpoint; use tensors, numbers and text")


def path_text(path: KeyPath) -> str:
    """Return the keys of the path, joined by slashes."""
    keys = []
    while path:
        path, key = path
        keys.append(str(key))
    return "/".join(reversed(keys))


def merge_trees(first: object, second: object) -> object:
    """Merge the trees of two ranks that hold different parts of a model.

    Mappings and lists are united (each rank has its own parameter groups); all other values are equal in both trees.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            key: merge_trees(first.get(key, item), second.get(key, item)) for key, item in {**first, **second}.items()
        }
    if isinstance(first, list) and isinstance(second, list) and first != second:
        return first + [item for item in second if item not in first]
    return first


def join_tensors(tree: object, tensors: Mapping[str, Tensor]) -> Any:
    """Return the original value from the tree and tensors that :func:`split_tensors` returned.

    Tensors missing from ``tensors`` belong to other ranks; mappings omit them.
    """
    if isinstance(tree, list):
        return [join_tensors(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$float" in tree:
        return float(tree["$float"])
    if "$tuple" in tree:
        return tuple(join_tensors(item, tensors) for item in tree["$tuple"])
    if "$items" in tree:
        return {join_tensors(key, tensors): join_tensors(item, tensors) for key, item in tree["$items"]}
    return {key: join_tensors(item, tensors) for key, item in tree.items() if not is_absent(item, tensors)}


def is_absent(item: object, tensors: Mapping[str, Tensor]) -> bool:
    return isinstance(item, dict) and "$tensor" in item and item["$tensor"] not in tensors


def generator_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's random generators, of 64 bits as torch allows."""
    return (seed * 1_000_003 + rank + 1) % 2**64


def seed_generators(seed: int) -> None:
    """Seed all generators whose state a checkpoint holds: Python's, NumPy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_random_state() -> StateDict:
    """Return the state of Python's, NumPy's and torch's generators (CPU, and the current GPU if CUDA is in use)."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: StateDict = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: StateDict) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(from_hex(state["cuda"]))


def from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
