"""Construction of models: built-in ones by name, the user's own by ``package.module:factory``.

If a model states the distributions of its parameters (:mod:`slipstream.shared.models.initial.drawn`), or has a base
(:mod:`slipstream.shared.models.base.tensors`), every device fills only the slices that it holds.
"""

from __future__ import annotations

import importlib
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType, MappingProxyType

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.adapters.network import AdaptedValues, add_adapters, quantise_frozen
from slipstream.shared.models.adapters.peft_files import read_peft
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.base.shape import shaped_for
from slipstream.shared.models.base.tensors import BaseValues, OpenedBase
from slipstream.shared.models.config import BUILT_IN, ModelConfig, fitting_model
from slipstream.shared.models.factory_code import import_from_working_directory
from slipstream.shared.models.initial.drawn import DrawnValues, InitialValues, StatesDeviations, fill_parameters
from slipstream.shared.models.pruning import Retained, prune_model
from slipstream.shared.models.tables_and_images import MLP, ResNet
from slipstream.shared.models.transformer import Transformer
from slipstream.shared.models.transformer_config import TransformerConfig
from slipstream.shared.settings import kinds_of, unknown_setting

#: Default maximum bytes of all operations' results for an evaluation batch.
BATCH_BYTES = 256 * 2**20
#: Maximum rows of an evaluation batch.
MOST_ROWS = 1024
#: Built-in models by name.
FACTORIES: dict[str, type[nn.Module]] = {"mlp": MLP, "resnet": ResNet, "transformer": Transformer}


class ResultBytes(TorchDispatchMode):
    """Dispatch mode that sums the bytes of all results except views: an upper bound of a forward pass's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def batch_rows(row_bytes: int, room: int = BATCH_BYTES) -> int:
    """Return the rows of an evaluation batch for ``row_bytes`` per row and ``room`` bytes in all.

    With the default ``room`` all machines compute the same bits.
    """
    return max(1, min(MOST_ROWS, room // max(1, row_bytes)))


class Predictor(nn.Module):
    """Model together with the scaling of its inputs and outputs.

    The model itself is the attribute ``network``, which prefixes the names of stored weights.

    ``forward(*inputs)`` takes tensors with the dtypes and values of the stored records, in the order of the signature.
    It returns logits ``[batch, classes]``, or ``[batch, length, tokens]`` for rows of tokens, or, for a regression,
    values ``[batch, 1]`` in units of the target. The same module is trained, evaluated and exported.

    A pipeline stage takes the previous stage's hidden states unless it is the ``first``, and returns hidden states
    unless it is the ``last``.
    """

    image_mean: Tensor
    image_std: Tensor
    #: Bytes of all operations' results in a forward pass, per row; measured by :func:`build_model`.
    row_bytes: int = 0
    first = last = True
    #: True if only adapters are trained; the other parameters are frozen and come from the base.
    adapted: bool = False
    #: For a pipeline stage: the pipeline coordinates of the processes that hold each parameter of the whole model.
    held_by: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def __init__(self, signature: Signature, model: nn.Module) -> None:
        super().__init__()
        self.signature = signature
        self.network = model
        # ONNX exporters round Python's numbers to float32. Scalars on the host fit any device.
        scaling = (signature.target_std, signature.target_mean)
        self.target_std, self.target_mean = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in scaling)
        self.register_buffer("image_mean", torch.tensor(signature.image_mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("image_std", torch.tensor(signature.image_std).view(1, -1, 1, 1), persistent=False)

    def owns(self, name: str) -> bool:
        """Return True unless the tensor ``name`` belongs to the base of a model with adapters."""
        return not self.adapted or is_adapter(name)

    def own_state(self) -> dict[str, Tensor]:
        """Return the state dict, or if ``adapted`` only the adapters."""
        return {name: tensor for name, tensor in self.state_dict().items() if self.owns(name)}

    def forward(self, *inputs: Tensor, ids: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Run the model; later pipeline stages, whose inputs are hidden states, may also need the row's ``ids``.

        ``documents`` is for a model whose plan has ``takes_documents``.
        """
        if self.signature.image_mean and self.first:
            # Both buffers stay on the host even if the model is on the meta device.
            mean, std = self.image_mean.to(inputs[0].device), self.image_std.to(inputs[0].device)
            inputs = tuple((x.to(torch.float32) - mean) / std for x in inputs)
        if self.signature.task == "next token" and self.first:
            inputs = tuple(x.long() for x in inputs)
        more = {} if documents is None else {"documents": documents}
        if ids is not None and not self.first:
            more["ids"] = ids.long()
        outputs = self.network(*inputs, **more)
        if self.signature.task == "regression" and self.last:
            # Precision matters: a target of about 1.7e9 would be a multiple of 128 in float32, and infinite in float16.
            if self.signature.target_dtype == "float64":
                return outputs.double() * self.target_std + self.target_mean
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            return outputs * self.signature.target_std + self.signature.target_mean
        return outputs


def resolve_model_name(config: ModelConfig, signature: Signature) -> str:
    """Return the model's name with "auto" resolved.

    Raises ``UserError`` if a built-in model does not fit the data.
    """
    return config.name_for(fitting_model(signature))


def build_model(
    config: ModelConfig,
    signature: Signature,
    seed: int,
    *,
    empty: bool = False,
    shapes_alone: bool = False,
    retained: Retained | None = None,
    origin: ModelOrigin | None = None,
) -> Predictor:
    """Build the model with initial weights from ``seed``, and run it on a batch of zeros.

    A model that states its parameters' standard deviations (``initial_std``, see
    :mod:`slipstream.shared.models.initial.drawn`) is built and run on the meta device and filled afterwards, maybe from
    its base, opened as ``origin``. With ``empty`` it stays there, so that every device can fill its own slices. With
    ``shapes_alone`` any model stays there, including buffers. Only the units ``retained`` are kept
    (:mod:`slipstream.shared.models.pruning`). Raises ``UserError`` if the factory is missing, does not take the
    arguments or raises, if its model does not fit the data or the retained units, or if the base does not fit;
    ``StorageUnavailable``.
    """
    origin = origin or ModelOrigin(config)
    config = shaped_for(config, signature, origin)
    name = resolve_model_name(config, signature)
    factory = factory_of(name)
    check_arguments(name, factory, config.arguments)
    torch.manual_seed(seed)
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in config.arguments.items()}
    device = torch.device("meta" if shapes_alone or hasattr(factory, "initial_std") else "cpu")
    try:
        with device if device.type == "meta" else nullcontext():
            model = factory(signature, **arguments)
    except UserError:
        raise
    except Exception as error:
        setting = "arguments" if arguments else "name"
        call = f"{name}({', '.join(f'{key}={reprlib.repr(value)}' for key, value in arguments.items())})"
        raise UserError(f"model.{setting}: {call} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name: {name} returned {type(model).__name__}; expected a torch.nn.Module")
    try:
        prune_model(model, retained or {})
    except ValueError as error:
        raise UserError(f"model.name: {name} is not the model that was pruned: {error}") from None
    if config.lora.rank:
        add_adapters(model, config.lora)
    predictor = Predictor(signature, model)
    predictor.adapted = config.lora.rank > 0
    was_training = predictor.training
    try:
        with torch.no_grad(), ResultBytes() as results:
            output = predictor.eval()(*zero_inputs(signature, 2, device))
    except Exception as error:
        takes = ", ".join(f"{spec.name} {spec.dtype} [batch, {str(spec.shape)[1:-1]}]" for spec in signature.inputs)
        raise UserError(
            f"model.name: {name} cannot run on this data: {type(error).__name__}: {error}; it is given {takes}"
        ) from error
    if getattr(output, "shape", None) != (2, *signature.output_shape):
        shape = list(getattr(output, "shape", ())) or type(output).__name__
        expected = [2, *signature.output_shape]
        raise UserError(f"model.name: {name} gave {shape} for a batch of 2; expected {expected}")
    if config.quantise == "nf4":  # After the batch of zeros, so that row_bytes excludes dequantisation.
        quantise_frozen(model)
    if shapes_alone:
        return predictor.train(was_training)
    if device.type == "meta":
        check_without_constants(name, model)
        if not empty:
            values = initial_values(config, model, seed, origin)
            fill_parameters(model.to_empty(device="cpu"), values)
    elif isinstance(model, StatesDeviations):  # The model of a function is known only after the call.
        fill_parameters(model, DrawnValues(model, seed))
    predictor.row_bytes = results.total // 2
    return predictor.train(was_training)


def initial_values(config: ModelConfig, model: nn.Module, seed: int, origin: ModelOrigin) -> InitialValues:
    """Return the initial values of ``model``: those of its base, opened as ``origin``, else drawn values.

    Raises ``UserError``, before reading any, if a base or start adapter lacks some of them, and ``StorageUnavailable``.
    """
    if not config.base:
        return DrawnValues(model, seed)
    base = OpenedBase.open(origin.base)
    base.check(model, tied=bool(config.arguments.get("tie_word_embeddings")))
    values = BaseValues(base)
    if not config.lora.rank:
        return values
    start = None
    if config.lora.start:
        adapter = read_peft(origin.start)
        adapter.check(config.lora, model)
        start = BaseValues(adapter.tensors)
    return AdaptedValues(values, seed, start)


def check_without_constants(name: str, model: nn.Module) -> None:
    """Raise ``UserError`` if a model on the meta device has tensors other than parameters.

    Such tensors would never get values.
    """
    constants = [path for path, _ in model.named_buffers()]
    for path, module in model.named_modules():
        constants += [f"{path}.{key}".lstrip(".") for key, value in vars(module).items() if isinstance(value, Tensor)]
    if constants:
        raise UserError(
            f"model.name: {name} has initial_std, so it is built without memory, and its tensor {constants[0]!r} "
            "would have no values; expected a tensor that the forward pass computes, or no initial_std"
        )


def zero_inputs(signature: Signature, rows: int, device: torch.device | str = "cpu") -> list[Tensor]:
    """Return inputs of ``rows`` zero rows with the signature's dtypes and shapes."""
    return [
        torch.zeros(rows, *spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in signature.inputs
    ]


def factory_of(name: str) -> Callable[..., object]:
    """Return the factory of a built-in model, or import the user's own (see :func:`import_factory`)."""
    return FACTORIES[name] if name in FACTORIES else import_factory(name)


def check_without_data(config: ModelConfig, name: str) -> None:
    """Raise ``UserError`` for arguments that the model ``name`` refuses whatever the data."""
    if name != "transformer":
        check_arguments(name, factory_of(name), config.arguments)
        return
    given = {key: value for key, value in config.arguments.items() if key != "config"}
    if config.base or "config" in config.arguments:  # They have the other settings, with which these must agree.
        given = {key: value for key, value in given.items() if key not in kinds_of(TransformerConfig)}
    TransformerConfig.from_dict({"vocab_size": 2, **given})


def argument_kinds(name: str) -> dict[str, tuple[object, object]]:
    """Return the types and defaults of a model's arguments, ``None`` where unknown; for "auto" of all built-in models.

    The same name means the same in all of them.
    """
    if name == "auto":
        return {key: kind for each in FACTORIES for key, kind in argument_kinds(each).items()}
    if name == "transformer":
        return {key: (kind, None) for key, kind in {"config": str, **kinds_of(TransformerConfig)}.items()}
    found = parameters_of(factory_of(name)) or []
    return {each.name: (stated(each.annotation), stated(each.default)) for each in found}


def stated(of: object) -> object:
    return None if of is inspect.Parameter.empty else of


def parameters_of(factory: Callable[..., object]) -> list[inspect.Parameter] | None:
    """Return the parameters of a factory after the first, the signature; ``None`` if the callable has none."""
    try:
        return list(inspect.signature(factory).parameters.values())[1:]
    except (TypeError, ValueError):
        return None


def check_arguments(name: str, factory: Callable[..., object], given: Iterable[str]) -> None:
    """Raise ``UserError`` if an argument is unknown to the factory, or a required argument is missing."""
    parameters, kinds = parameters_of(factory), inspect.Parameter
    if parameters is None:
        return
    named = {each.name: each for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    takes_any = any(each.kind == kinds.VAR_KEYWORD for each in parameters)
    if odd := next((key for key in given if key not in named and not takes_any), None):
        other = next((each for each in BUILT_IN if name in BUILT_IN and odd in argument_kinds(each)), None)
        if other:
            owner = f"model.arguments.{odd}: is an argument of {other}, which takes {BUILT_IN[other]}"
            raise UserError(f"{owner}; expected one of {name}: {', '.join(sorted(named))}")
        raise UserError(unknown_setting("model.arguments", odd, list(named)))
    needed = (key for key, each in named.items() if each.default is kinds.empty and key not in given)
    if missing := next(needed, None):
        raise UserError(f"model.arguments.{missing}: is missing; {name} takes no default for it")


def import_factory(name: str) -> Callable[..., object]:
    """Import the user's factory, with the working directory on the import path, as for ``python -m``.

    Importing and calling it runs code: ``name`` must come from the user's own configuration, even if a stored
    :class:`~slipstream.shared.models.trained.Architecture` has it, too. Raises ``UserError`` unless it is a function or
    a model class that the named module itself defines, so that its reader sees what is called.
    """
    module_name, _, attribute = name.partition(":")
    expected = "a function that returns a torch.nn.Module, or a class of them"
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise UserError(
            f"model.name: {name} belongs to Python's standard library; expected {expected}, in a module of another name"
        )
    import_from_working_directory()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"model.name: cannot import {module_name!r}: {type(error).__name__}: {error}; "
            f"expected 'package.module:factory', importable from the working directory or installed"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise UserError(f"model.name: {module_name!r} has no factory {attribute!r}")
    is_class = isinstance(factory, type) and issubclass(factory, nn.Module)
    if not is_class and not isinstance(factory, FunctionType):
        what = f"the class {factory.__name__}" if isinstance(factory, type) else f"a {type(factory).__name__}"
        raise UserError(f"model.name: {name} is {what}; expected {expected}, defined in {module_name}")
    if factory.__module__ != module.__name__:
        there = f"{factory.__module__}:{factory.__qualname__}"
        raise UserError(f"model.name: {name} is defined in {factory.__module__}; name it there: {there}")
    return factory
