"""Settings of the model."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field

from slipstream.shared.settings import LARGEST, Natural, Settings, settings
from slipstream.shared.spelling import NO_NUMBER, NO_TEXT, NONE

if TYPE_CHECKING:
    from slipstream.shared.artifacts.prepared.data import Signature

#: Maximum number of blocks of a model; language models have at most 126.
DEEPEST = 2000
#: Allowed numbers in the untyped arguments of models: those that JSON and Flyte's encoding can hold.
STORABLE = "finite numbers, integers of at most 64 bits"
#: Linear layers of a block of our transformer.
LinearLayer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR_LAYERS: tuple[LinearLayer, ...] = get_args(LinearLayer)
BuiltIn = Literal["mlp", "resnet", "transformer"]
#: Kind of data that each built-in model is for.
BUILT_IN: dict[BuiltIn, str] = {
    "mlp": "tables",
    "resnet": "images",
    "transformer": "text to continue (data.task: language)",
}
#: Arguments of the "mlp" for tables with fewer training rows than this, where the user gives no others: its usual size
#: overfits them (tests/train/test_small_sets.py).
FEW_ROWS = 500
FOR_FEW_ROWS: dict[str, object] = {"hidden": [64], "frequencies": 2}


def fitting_model(signature: Signature) -> BuiltIn:
    if signature.task == "next token":
        return "transformer"
    return "resnet" if signature.image_mean else "mlp"


@settings
class LoraConfig(Settings):
    """Low-rank adapters (Hu et al. 2021, "LoRA"): trained low-rank updates of frozen linear layers."""

    section = "model.lora"

    rank: Annotated[Natural, NO_NUMBER] = 0
    """Rank of the adapters; null means no adapters: all weights of the base are trained."""
    alpha: Annotated[float, Field(gt=0, le=LARGEST)] = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's inputs in training."""
    targets: list[LinearLayer] = field(default_factory=lambda: list(LINEAR_LAYERS))
    """Names of the linear layers that get an adapter, in every block."""

    start: Annotated[str, NO_TEXT] = ""
    """Adapter to start from: a local directory or a store's address with peft's files, of the same rank, alpha and
    targets. null: a new adapter, whose initial output is 0."""

    def check(self) -> None:
        if self.rank and not self.targets:
            raise self.reject("targets", "at least one linear layer")
        if self.start and not self.rank:
            raise self.reject("start", "null, or the adapter's rank in model.lora.rank")
        if len(set(self.targets)) < len(self.targets):
            raise self.reject("targets", "each layer once")


@settings
class ModelConfig(Settings):
    """Model to train."""

    section = "model"

    name: str = "auto"
    """Name of the model: "mlp" for tables, "resnet" for images, "transformer" for rows of tokens, or "auto", which
    chooses by the data. Or your own model as "package.module:factory": a function or a class that this module defines,
    called with the Signature and the arguments. A trained model of your own factory can only be opened with this
    setting."""
    # A bare dict: flytekit warns of pickles at every start if it finds an Any in a type.
    arguments: dict = field(default_factory=dict)
    """Keyword arguments of the built-in model or of your factory. An mlp for fewer than 500 training rows is smaller
    unless they say otherwise."""
    base: Annotated[str, NO_TEXT] = ""
    """Model to fine-tune: a local directory or a store's address, with Hugging Face's config.json (Llama, Mistral, Qwen
    2 or 3) and safetensors. null: training from scratch."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters to train instead of the base's weights. The frozen weights are then stored in bf16 if training computes
    in bf16."""
    quantise: Annotated[Literal["none", "nf4"], NONE] = "none"
    """Format of the frozen weights of layers with adapters: null leaves them unchanged, "nf4" stores them in four
    bits (Dettmers et al. 2023, "QLoRA")."""

    def check(self) -> None:
        if odd := next((name for name in self.arguments if not isinstance(name, str)), None):
            raise self.reject("arguments", f"names of keyword arguments, not {odd!r}")
        if not all(map(is_storable, self.arguments.values())):
            raise self.reject("arguments", STORABLE)
        builtin = ("auto", *BUILT_IN)
        module, colon, factory = self.name.partition(":")
        if self.name not in builtin and not (module and colon and factory.isidentifier()):
            raise self.reject("name", f"one of {', '.join(builtin)}, or your own as 'package.module:factory'")
        if self.base and self.name not in ("auto", "transformer"):
            raise self.reject("name", "transformer, the kind of model.base")
        if self.quantise != "none" and not self.lora.rank:
            raise self.reject("quantise", "null, or a model.lora.rank: weights in four bits cannot be trained")

    def name_for(self, fitting: BuiltIn) -> str:
        """Return the name; for "auto" return ``fitting``, the built-in model that fits the data.

        Raises ``UserError`` if the name is that of another built-in model.
        """
        if self.name in BUILT_IN and self.name != fitting:
            kinds = f"{self.name} takes {BUILT_IN[self.name]}, and these data are {BUILT_IN[fitting]}"
            raise self.reject("name", f"auto or {fitting}: {kinds}")
        return fitting if self.name == "auto" else self.name

    def for_rows(self, rows: int, signature: Signature) -> ModelConfig:
        """Return the settings for a training split of ``rows`` rows."""
        if rows >= FEW_ROWS or self.factory or fitting_model(signature) != "mlp":
            return self
        return replace(self, arguments={**FOR_FEW_ROWS, **self.arguments})

    def check_base(self) -> None:
        """Raise ``UserError`` if adapters have no base."""
        # Not in check, since ``base`` may be set later than other settings.
        if self.lora.rank and not self.base:
            raise self.lora.reject("rank", "null, or a model.base that adapters are trained for")

    def without_addresses(self) -> ModelConfig:
        """Return a copy without the addresses of base and start adapter, for keys that have their digests instead."""
        return replace(self, base="", lora=replace(self.lora, start=""))

    @property
    def factory(self) -> str:
        """User's factory, which is untrusted; "" for built-in models."""
        return self.name if ":" in self.name else ""


@settings
class TeachingConfig(Settings):
    """Distillation from a larger model, the teacher, in addition to the labels."""

    section = "compression.teaching"

    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight w of the teacher in the loss: w times the teacher's loss plus (1 - w) times the labels' loss. 0 disables
    the teacher."""
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Divisor of both models' logits before their softmaxes are compared: a larger value gives more weight to classes
    that the teacher finds unlikely. Not used for regression."""


def is_storable(value: object) -> bool:
    """Return True if all numbers in a model's argument are :data:`STORABLE`."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_storable, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64
