"""Search for the smallest model: the next candidate, the sizes of students, refusals."""

import pytest

from slipstream.pipeline.compress.config import ROUNDS, CompressionConfig
from slipstream.pipeline.compress.engine import (
    arguments_in_words,
    next_candidate,
    removable_shares,
    smallest_passing,
    student_configs,
)
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.results.compression import CompressionTrial
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from tests.support.compression_trials import tried
from tests.support.wording import refuses

NUMBERS = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))


@pytest.mark.parametrize("largest", range(-1, 15))
def test_the_largest_share_that_passes_is_found_in_four_rounds(largest: int) -> None:
    config = CompressionConfig()
    found: list[CompressionTrial] = []
    assert len(removable_shares(config)) == 15 and removable_shares(config)[7] == 0.5
    for _ in range(ROUNDS):
        candidate = next_candidate(15, found, config)
        if candidate not in [one.candidate for one in found]:
            found.append(tried(candidate, "passed" if candidate <= largest else "failed"))
    winner = smallest_passing(found, config)
    assert (winner.candidate if winner else -1) == largest


def test_in_doubt_nothing_is_taken_unless_it_was_said() -> None:
    found = [tried(7, "can't tell")]
    assert smallest_passing(found, CompressionConfig()) is None and next_candidate(15, found, CompressionConfig()) == 3
    take = CompressionConfig(when_in_doubt="take")
    assert smallest_passing(found, take) == found[0] and next_candidate(15, found, take) == 11


def test_when_the_time_is_over_no_other_network_is_proposed() -> None:
    config = CompressionConfig(minutes=1)
    assert next_candidate(15, [tried(7, "passed", 61)], config) == 7
    assert next_candidate(15, [tried(7, "failed", 61)], config) == 7
    assert next_candidate(15, [tried(7, "passed", 40), tried(11, "failed", 21)], config) == 7
    assert next_candidate(15, [tried(7, "passed", 40), tried(11, "failed", 19)], config) == 9


def test_students_are_narrower_the_largest_first() -> None:
    narrower = student_configs(ModelConfig("mlp", {"hidden": [64, 16]}), NUMBERS, CompressionConfig())
    assert [student.arguments["hidden"] for student in narrower] == [*([48, 16], [32, 8], [24, 8], [16, 8], [8, 8])]
    named = CompressionConfig(students=[{"hidden": [8]}, {"hidden": [32, 8]}])
    found = student_configs(ModelConfig("mlp", {"hidden": [64, 16], "dropout": 0.1}), NUMBERS, named)
    assert [student.arguments for student in found] == [
        {"hidden": [32, 8], "dropout": 0.1},
        {"hidden": [8], "dropout": 0.1},
    ]
    assert arguments_in_words({"hidden": [96, 48], "dropout": 0.1}) == "hidden 96-48, dropout 0.1"


def test_students_that_cannot_be_are_refused() -> None:
    trained = ModelConfig("mlp", {"hidden": [64, 16]})
    with refuses(UserError, match="compression.students:"):
        student_configs(trained, NUMBERS, CompressionConfig(students=[{"hidden": [64, 16]}]))
    with refuses(UserError, match="compression.students:"):
        student_configs(ModelConfig("a.b:c"), NUMBERS, CompressionConfig())
    with refuses(UserError):
        student_configs(ModelConfig("mlp", {"hidden": [8]}), NUMBERS, CompressionConfig())


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"share": 1.0}, "compression.share"),
        ({"method": "shrink"}, "compression.method"),
        ({"teaching": {"weight": 2}}, "compression.teaching.weight"),
        ({"teaching": {"temperature": 0}}, "compression.teaching.temperature"),
        ({"students": [3]}, r"compression.students\[0\]"),
    ],
)
def test_wrong_settings_are_refused_by_their_path(settings: dict[str, object], path: str) -> None:
    with pytest.raises(UserError, match=path):
        CompressionConfig.from_dict(settings)
