"""Untrusted bases: no other file is read through their links."""

from pathlib import Path

import pytest
import torch

from slipstream.shared.artifacts.prepared.token_rows import CONFIG, INDEX, WHOLE
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from tests.support.bases import SIGNATURE, fingerprint_base, make_base
from tests.support.untrusted import download_from_hub, exchange_at_open, make_secret, replace_by_link
from tests.support.wording import refuses

PART = "model-00002-of-00004.safetensors"


def built(base: Path) -> dict[str, torch.Tensor]:
    return build_model(ModelConfig(base=str(base)), SIGNATURE, seed=0, empty=False).network.state_dict()


@pytest.mark.parametrize("name", [CONFIG, WHOLE, INDEX, PART])
def test_no_file_is_read_through_a_link_that_leads_out(name: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", max_shard_size="35KB" if name in (INDEX, PART) else None)
    (base / name).rename(tmp_path / name)
    (base / name).symlink_to(f"../{name}")
    for work in (built, lambda base: fingerprint_base(str(base))) if name != INDEX else (built,):
        with refuses(UserError, match=f"{name}:"):
            work(base)


def test_weights_that_are_exchanged_while_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(tmp_path / "base")
    exchanged = exchange_at_open(monkeypatch, base / WHOLE, make_secret(tmp_path))
    with refuses(UserError, match=r"model\.safetensors:"):
        built(base)
    assert exchanged


def test_a_pipe_or_a_device_is_no_file_of_a_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    replace_by_link(base / WHOLE, "/dev/zero")
    with refuses(UserError):
        built(base)
    replace_by_link(base / CONFIG, "/dev/zero")
    with refuses(UserError):
        built(base)


@pytest.mark.parametrize("shards", [None, "35KB"])
def test_a_base_in_hugging_faces_cache(shards: str | None, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", max_shard_size=shards)
    snapshot = download_from_hub(base, tmp_path / "cache")
    found, expected = built(snapshot), built(base)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert fingerprint_base(str(snapshot)) == fingerprint_base(str(base))
