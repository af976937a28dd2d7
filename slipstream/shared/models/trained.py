"""Trained model: the artifact that training writes, and evaluation and export read.

It holds ``best.safetensors`` and ``last.safetensors`` (all weights, or only adapters), ``model.json``
(:class:`Architecture`), of a fine-tuned model ``base/`` with its base's settings, and, once trained, ``history.json``
and ``attempt.json`` (:mod:`slipstream.shared.artifacts.results.training`).

Anyone may have made the artifact, so a factory in ``model.json`` is imported and called only if the user's own
configuration names it, too; see :meth:`TrainedModel.open`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact, canonical_json
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.artifacts.records import read_record, write_record
from slipstream.shared.artifacts.results.training import HISTORY, KIND, History
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.base.directory import INHERITED, SETTINGS, BaseRecord, ModelOrigin
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor, build_model, resolve_model_name
from slipstream.shared.models.pruning import Retained

MODEL = "model.json"
LOG = logger("models")

#: safetensors' names of dtypes. A file has the tensors sorted by dtype, the last of these dtypes first.
TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
ORDER = {dtype: place for place, dtype in enumerate(TYPES)}
#: Alignment of the header's end and the first tensor, in bytes.
ALIGNMENT = 8


class TensorType(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Weights:
    """Named tensors, produced one at a time in the order of :func:`in_file_order`."""

    kinds: Mapping[str, TensorType]
    tensors: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Wrap tensors that are all in memory."""
        kinds = {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls(kinds, lambda: (tensors[name] for name in in_file_order(kinds)))

    def once(self) -> Weights:
        """Return the same tensors as a shared iterator, which yields every tensor only once."""
        left = iter(self.tensors())
        return Weights(self.kinds, lambda: left)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a safetensors file."""
        yield safetensors_header({name: self.kinds[name] for name in in_file_order(self.kinds)})
        for tensor in self.tensors():
            yield raw_bytes(tensor.cpu())


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def in_file_order(kinds: Mapping[str, TensorType]) -> list[str]:
    return sorted(kinds, key=lambda name: (-ORDER[kinds[name].dtype], name))


def safetensors_header(kinds: Mapping[str, TensorType], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors header: its length (uint64, little-endian), metadata and the tensors' offsets.

    The tensors follow in the order of ``kinds``.
    """
    entries, start = dict[str, object]({"__metadata__": dict(metadata)} if metadata else {}), 0
    for name, kind in kinds.items():
        offsets = [start, start + kind.nbytes]
        entries[name] = {"dtype": TYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": offsets}
        start += kind.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class UntrustedFactory(UserError):
    """Raised if a trained model names a factory that the user's configuration does not name."""


@dataclass(frozen=True)
class Architecture:
    """Contents of ``model.json``: all of a model except its weights.

    ``config`` is that of the training. In an opened model its factory was compared with the user's configuration.
    """

    config: ModelConfig
    signature: Signature
    #: Retained units of a pruned model; empty without pruning.
    retained: Annotated[Retained, Field(alias="kept")] = field(default_factory=dict)
    #: Base of a fine-tuned model; None for a model trained from scratch.
    base: BaseRecord | None = None

    def empty(self) -> Predictor:
        """Build the model without its weights, on the meta device if it supports that.

        Raises ``UserError`` if it cannot be built or run.
        """
        return build_model(self.config, self.signature, seed=0, empty=True, retained=self.retained)

    def on_base(self) -> Predictor:
        """Build a model with adapters, and load its base's weights.

        Raises ``UserError`` if the base is missing or has changed, ``StorageUnavailable`` if its store does not answer.
        """
        assert self.base is not None, "of a model with adapters it was checked when that was opened"
        # The start adapter may be gone; its weights are overwritten anyway.
        config = replace(self.config, base=self.base.address, lora=replace(self.config.lora, start=""))
        origin = ModelOrigin(config)
        self.base.check(origin)
        return build_model(config, self.signature, seed=0, origin=origin)


@dataclass(frozen=True)
class TrainedModel:
    """Opened trained model, whose weights are not loaded yet."""

    artifact: Artifact
    architecture: Architecture

    @property
    def config(self) -> ModelConfig:
        return self.architecture.config

    @property
    def signature(self) -> Signature:
        return self.architecture.signature

    @classmethod
    def open(cls, directory: Path, factory: str = "") -> TrainedModel:
        """Open a trained model.

        ``factory`` is the factory in the user's configuration (:attr:`ModelConfig.factory`); without it only built-in
        models can be opened. Raises ``DamagedArtifact`` if the directory does not hold a complete trained model,
        ``UntrustedFactory`` if the model names another factory, which is never imported.
        """
        artifact = Artifact.open(directory, KIND)
        architecture = read_record(artifact, MODEL, Architecture)
        config, base = architecture.config, architecture.base
        if (config.lora.rank > 0) != bool(config.base) or (config.base and (not base or base.address != config.base)):
            raise DamagedArtifact(
                f"{directory / MODEL}: its adapters, model.base and base do not agree; expected an address in both for "
                "a model with adapters, and none in model.base for any other"
            )
        named = config.factory
        if named not in ("", factory):
            raise UntrustedFactory(
                f"{directory / MODEL}: names the factory {named}, which is only called if your "
                f"configuration names it, too; if you know that code, add model.name: {named}"
            )
        return cls(artifact, architecture)

    def load(self, which: str = "best") -> Predictor:
        """Return the model with its ``best`` or ``last`` weights, in evaluation mode, on the CPU.

        Adapters are loaded on top of the base's weights. Raises ``DamagedArtifact`` if the file does not hold the
        model's weights, ``UserError`` if the factory now builds another model; also raises like
        :meth:`Architecture.on_base`.
        """
        predictor = self.architecture.on_base() if self.config.lora.rank else self.architecture.empty()
        # Parameters on the meta device are replaced by the file's tensors.
        unfilled = any(parameter.is_meta for parameter in predictor.parameters())
        file = f"{which}.safetensors"
        try:
            weights = load(self.artifact.read_bytes(file))
        except SafetensorError as error:
            raise DamagedArtifact(f"{self.artifact.directory / file}: does not hold weights: {error}") from None
        try:
            # A file of adapters holds only these, so loading cannot be strict.
            predictor.load_state_dict(weights, strict=not predictor.adapted, assign=unfilled)
        except RuntimeError as error:
            _, first, *_ = str(error).splitlines()
            raise UserError(
                f"{self.artifact.directory}: its weights do not fit the model that {self.config.name} makes now "
                f"({first.strip()[:200]}); expected the code that it was trained with"
            ) from None
        if weights.keys() != predictor.own_state().keys():
            raise DamagedArtifact(f"{self.artifact.directory / file}: does not hold the adapters of this model")
        return predictor.eval()

    def load_base(self) -> Predictor | None:
        """Return the base before fine-tuning, in evaluation mode, on the CPU.

        None for a model trained from scratch, or fully fine-tuned from a base that is now missing. Raises ``UserError``
        if the base of adapters is missing, ``StorageUnavailable`` if its store does not answer.
        """
        record = self.architecture.base
        if record is None:
            return None
        untouched = replace(self.config, base=record.address, lora=LoraConfig(), quantise="none")
        origin = ModelOrigin(untouched)
        try:
            record.check(origin)
        except UserError as error:
            if self.config.lora.rank:
                raise
            LOG.warning("%s; the evaluation continues without it", error.message)
            return None
        return build_model(untouched, self.signature, seed=0, origin=origin).eval()

    @property
    def inherited(self) -> dict[str, dict[str, Any]]:
        """Settings of the base by file name; empty for a model from scratch, and for one of an older release.

        Raises ``DamagedArtifact``.
        """
        there = {name: f"{INHERITED}/{name}" for name in SETTINGS if f"{INHERITED}/{name}" in self.artifact.files}
        found = {name: self.artifact.read_json(file) for name, file in there.items()}
        if odd := next((name for name, content in found.items() if not isinstance(content, dict)), ""):
            raise DamagedArtifact(f"{self.artifact.directory / INHERITED / odd}: is not a JSON object")
        return found

    def inherited_files(self) -> dict[str, bytes]:
        return {f"{INHERITED}/{name}": canonical_json(content) for name, content in self.inherited.items()}

    @property
    def history(self) -> History:
        return read_record(self.artifact, HISTORY, History)

    @property
    def threshold(self) -> float | None:
        """Decision threshold of the best weights; None if the likeliest class is predicted."""
        return self.history.best.threshold if HISTORY in self.artifact.files else None


def write_trained(
    directory: Path,
    architecture: Architecture,
    best: Mapping[str, Tensor] | Weights,
    last: Mapping[str, Tensor] | Weights,
    made_by: Mapping[str, object],
    record: Mapping[str, bytes] | None = None,
) -> Artifact:
    """Write the artifact of a trained model.

    ``best`` and ``last`` are state dicts of the :class:`Predictor`, or their tensors one at a time. ``record`` holds
    the files about its training, by name.
    """
    writer = ArtifactWriter(directory)
    for name, weights in (("best", best), ("last", last)):
        with writer.create(f"{name}.safetensors") as file:
            for chunk in (weights if isinstance(weights, Weights) else Weights.of(weights)).chunks():
                file.write(chunk)
    config = architecture.config
    named = replace(config, name=resolve_model_name(config, architecture.signature))
    if not config.lora.rank:
        # A fully fine-tuned model has all its weights and no longer needs its base.
        named = ModelConfig(named.name, named.arguments)
    write_record(writer, MODEL, replace(architecture, config=named))
    for name, data in (record or {}).items():
        writer.write_bytes(name, data)
    return writer.finish(KIND, made_by)
