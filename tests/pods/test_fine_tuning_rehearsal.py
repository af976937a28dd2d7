"""The packaged fine-tuning on a rehearsed cluster: base and text are in a store, and lost pods change no bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.config import RunConfig
from slipstream.operations.proofs.rehearsal.acts import Acts
from slipstream.operations.proofs.rehearsal.rehearsal import Rehearsal, literal, rehearsal, shrunk
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.profiles.profile import load_profile
from slipstream.shared.source.config import DataConfig
from tests.support.bases import make_base
from tests.support.corpora import write_stories

WORKFLOW = "workflows.training.fine_tune"
CONFIG = RunConfig(
    data=DataConfig(length=24),
    model=ModelConfig(lora=LoraConfig(rank=4, dropout=0.1)),
    training=TrainingConfig(
        epochs=2,
        batch_size=16,
        patience=0,
        checkpoint_every=4,
        recompute="full",
        parallel=ParallelConfig(shard="weights"),
    ),
    export=ExportConfig(calibration_rows=32, seconds=1.0),
    collectives=CollectivesConfig(operations=["all_reduce"], smallest=1024, largest=4096, budget=0.01, launches=1),
)


@pytest.fixture(scope="module")
def spot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path_factory.mktemp("spot"), shrunk(load_profile("a100-spot"))) as place:
        yield place


@pytest.mark.prove
def test_kills_change_nothing_in_the_adapters(spot: Rehearsal, tmp_path: Path) -> None:
    inputs = {
        "base": literal(spot.bucket.upload(make_base(tmp_path / "base", max_shard_size="40KB"), "base")),
        "data": literal(spot.bucket.upload(write_stories(tmp_path / "stories", 90), "stories")),
        "config": literal(CONFIG),
    }
    acts = Acts(spot, inputs, print, workflow=WORKFLOW)
    undisturbed = acts.undisturbed()
    trained = [attempt for attempt in undisturbed.record.attempts if attempt.task == "train"]
    assert [len(attempt.pods) for attempt in trained] == [2], "two pods, which divide the model"
    acts.again()
    acts.disturbed(seed=0, number=5)
