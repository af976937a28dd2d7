"""Search space of a sweep, and configurations with values from it."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import RunConfig
from slipstream.pipeline.sweep.config import RangeConfig, SweepConfig, Values
from slipstream.pipeline.train.config import StepProfileConfig, decides_result
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.results.sweep import AS_GIVEN
from slipstream.shared.errors import UserError
from slipstream.shared.settings import Settings, to_dict, unknown_setting

#: Prefix of paths without a fixed name: keyword arguments of the model's factory.
FREE = "model.arguments"


@dataclass(frozen=True)
class SearchedParameter:
    """Searched setting; ``whole`` is True if its range has integers only.

    This follows from the setting's type; for model arguments, which have none here, from the types of low and high.
    """

    path: str
    range: RangeConfig
    whole: bool

    @property
    def extremes(self) -> list[Any]:
        """Lower and upper bound, or all choices."""
        if self.range.choices:
            return list(self.range.choices)
        assert self.range.low is not None and self.range.high is not None, "a range without choices has both"
        return [int(each) if self.whole else each for each in (self.range.low, self.range.high)]

    def allows(self, value: object) -> bool:
        """Return True if ``value`` can be drawn from the range."""
        if self.range.choices:
            return choice_text(value) in map(choice_text, self.range.choices)
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        low, high = self.extremes
        return bool(low <= value <= high)


def choice_text(value: object) -> str:
    """Return a choice as JSON with sorted keys; 1, 1.0 and true are different choices."""
    return json.dumps(value, sort_keys=True)


def values_objection(values: Values, parameters: Sequence[SearchedParameter]) -> str:
    """Return why the sampler would never propose ``values``; "" if it could.

    ``values`` come from a store and are untrusted: they must set exactly the paths of the space.
    """
    by_path = {each.path: each for each in parameters}
    if others := sorted(values.keys() - by_path):
        return f"sets {', '.join(others)}, which sweep.space does not have"
    for path, parameter in by_path.items():
        if path not in values:
            return f"does not set {path}, which sweep.space has"
        if not parameter.allows(values[path]):
            return f"sets {path} to {reprlib.repr(values[path])}, which cannot be drawn from sweep.space"
    return ""


def searched_parameters(config: RunConfig) -> list[SearchedParameter]:
    """Return the parameters of ``config.sweep.space``, sorted by path.

    Raises ``UserError`` for a path that is not a setting of training, and for values that the setting rejects.
    """
    ranges = config.sweep.ranges()
    if not ranges:
        raise UserError("sweep.space: is empty; expected settings to search, such as training.learning_rate")
    # Only the type of training.batch_size counts here, not the number that it is for the data.
    typed = replace(config, training=config.training.for_rows(0))
    return [parameter_of(typed, path, ranges[path]) for path in sorted(ranges)]


def untyped_parameters(space: dict[str, Any]) -> list[SearchedParameter]:
    """Return the parameters of a space without a configuration, so with unknown types.

    Raises ``UserError`` for an invalid path or range.
    """
    ranges = SweepConfig(space=space).ranges()
    return [SearchedParameter(path, ranges[path], whole=False) for path in sorted(ranges)]


def parameter_of(config: RunConfig, path: str, of: RangeConfig) -> SearchedParameter:
    where = f"sweep.space[{path}]"
    if path.startswith(f"{FREE}."):
        written = config.sweep.space[path]
        return SearchedParameter(
            path, of, whole=isinstance(written.get("low"), int) and isinstance(written.get("high"), int)
        )
    value = setting_at(config, path)
    section, name = path.split(".")[:2]
    if section == "training" and not decides_result(name):
        raise UserError(f"{where}: does not change the trained model; expected a setting that does")
    if isinstance(value, Settings):
        names = ", ".join(field.name for field in dataclasses.fields(value))
        raise UserError(f"{where}: is a section; expected one of its settings: {names}")
    if not of.choices and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UserError(f"{where}: has no range, as its values are not numbers; expected choices")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and not of.choices and not all(float(each or 0).is_integer() for each in (of.low, of.high)):
        raise UserError(f"{where}: takes whole numbers; expected whole numbers as low and high")
    parameter = SearchedParameter(path, of, whole)
    for extreme in parameter.extremes:
        try:
            with_values(config, {path: extreme})
        except UserError as error:
            raise UserError(f"sweep.space: {error.message}") from None
    return parameter


def setting_at(config: RunConfig, path: str) -> Any:
    """Return the value of the setting at ``path``.

    Raises ``UserError`` if there is no such setting.
    """
    found: Any = config
    steps = path.split(".")
    for place, step in enumerate(steps):
        names = [field.name for field in dataclasses.fields(found)] if isinstance(found, Settings) else []
        if step not in names:
            raise UserError(f"sweep.space: {unknown_setting('.'.join(steps[:place]), step, names)}")
        found = getattr(found, step)
    return found


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with ``values`` set by path.

    Raises ``UserError`` for invalid values.
    """
    tree = to_dict(config)
    for path, value in values.items():
        *above, last = path.split(".")
        place = tree
        for step in above:
            place = place[step]
        place[last] = value
    return RunConfig.from_dict(tree)


def trial_config(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a single-process trial with ``values``.

    Settings that only serve a full training are reset.
    """
    tried = with_values(config, values)
    training = replace(
        tried.training,
        parallel=ParallelConfig(),
        network_profile="",
        checkpoint_uri="",
        profile=StepProfileConfig(),
    )
    return replace(tried, training=training, sweep=SweepConfig())


def values_in_words(values: Values) -> str:
    """Format values, such as ``learning_rate 0.00213, hidden [64, 64]``."""
    if not values:
        return AS_GIVEN
    return ", ".join(f"{path.rpartition('.')[2]} {in_short(value)}" for path, value in sorted(values.items()))


def in_short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
