"""Fine-tuning of a base in a store: all ranks together request every byte once."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.models.base.tensors import LENGTH_BYTES
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.storage import storage_for
from tests.support.bases import LENGTH, make_base, some_tokens, theirs
from tests.support.corpora import prepare_language, write_stories
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import Remote
from tests.support.training import trained


def asked_for(requests: list[str], part: Path) -> int:
    """The bytes of a part's tensors that ranges were asked for."""
    first = LENGTH_BYTES + int.from_bytes(part.read_bytes()[:LENGTH_BYTES], "little")
    ranges = (re.search(rf"GET \S*/{part.name}\S* bytes=(\d+)-(\d+)$", line) for line in requests)
    places = [(int(found[1]), int(found[2])) for found in ranges if found]
    return sum(last + 1 - begin for begin, last in places if begin >= first)


@pytest.mark.prove
def test_ranks_share_the_bytes_of_a_base_in_a_store(store: FaultyS3, tmp_path: Path) -> None:
    remote = Remote(f"s3://bucket/{tmp_path.name}/base", store, "PUT")
    here = make_base(tmp_path / "base", max_shard_size="20KB")
    for path in here.iterdir():
        storage_for(remote.base).put(path.name, path.read_bytes())
    stories = write_stories(tmp_path / "stories")
    data = prepare_language(tmp_path / "prepared", stories, tokenizer=remote.base, length=LENGTH)
    store.requests.clear()
    training = TrainingConfig(epochs=1, batch_size=64, learning_rate=1e-30, weight_decay=0.0)
    training = replace(training, parallel=ParallelConfig(shard="weights"))
    place, model = tmp_path / "run", ModelConfig(base=remote.base)
    directory = trained(data.artifact.directory, place, 2, training, model, remote.environment)
    found = TrainedModel.open(directory)
    with torch.no_grad():
        torch.testing.assert_close(found.load()(some_tokens()), theirs(here, some_tokens()), rtol=0, atol=1e-5)
    parts = sorted(here.glob("*.safetensors"))
    tensors = sum(parameter.nbytes for parameter in found.load().parameters())
    assert len(parts) > 3 and tensors == sum(asked_for(store.requests, part) for part in parts)
