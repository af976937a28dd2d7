"""Smaller models (students) for the distillation of a trained model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.tables_and_images import MLP, ResNet

#: Built-in models with the argument that holds their widths; and the fractions of the widths that students have.
WIDTHS = {"mlp": (MLP, "hidden"), "resnet": (ResNet, "widths")}
SHARES = (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
#: Divisor of widths, for group normalisation.
MULTIPLE = 8


def student_configs(trained: ModelConfig, signature: Signature, config: CompressionConfig) -> list[ModelConfig]:
    """Return the models of ``compression.students``, else narrower versions of the trained model; the largest first.

    Raises ``UserError`` if a student is no smaller than the trained model or cannot be built, or if none is named for a
    model that is not built in.
    """
    wanted = config.students or narrower_arguments(trained)
    students = [ModelConfig(trained.name, {**trained.arguments, **arguments}) for arguments in wanted]
    sizes = [count_parameters(student, signature) for student in students]
    whole = count_parameters(trained, signature)
    for student, arguments, size in zip(students, wanted, sizes, strict=True):
        if size >= whole:
            raise UserError(
                f"compression.students: {arguments_in_words(arguments)} has {size:,} parameters, not fewer than the "
                "trained "
                f"model's {whole:,}; expected arguments that make {student.name} smaller"
            )
    return [students[index] for index in sorted(range(len(students)), key=lambda index: -sizes[index])]


def narrower_arguments(trained: ModelConfig) -> list[dict[str, object]]:
    if trained.name not in WIDTHS:
        raise UserError(
            f"compression.students: there is no rule to make {trained.name} smaller; expected a list of arguments of "
            'its factory, such as [{"hidden": [96, 48]}]'
        )
    network, argument = WIDTHS[trained.name]
    widths = trained.arguments.get(argument) or inspect.signature(network).parameters[argument].default
    candidates: list[dict[str, object]] = []
    for share in SHARES:
        scaled = [min(width, max(MULTIPLE, round(share * width / MULTIPLE) * MULTIPLE)) for width in widths]
        if scaled != list(widths) and {argument: scaled} not in candidates:
            candidates.append({argument: scaled})
    if not candidates:
        raise UserError(
            "compression.students: this model is too small to be made narrower; train it without compression"
        )
    return candidates


def count_parameters(config: ModelConfig, signature: Signature) -> int:
    """Return the number of parameters. Raises ``UserError`` if the model cannot be built."""
    try:
        return sum(p.numel() for p in build_model(config, signature, seed=0, empty=True).parameters())
    except UserError as error:
        raise UserError(f"compression.students: {error.message}") from error


def arguments_in_words(arguments: Mapping[str, object]) -> str:
    """Return the arguments as text, such as ``hidden 96-48``."""
    values = {
        name: "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in arguments.items()
    }
    return ", ".join(f"{name} {value}" for name, value in values.items())
