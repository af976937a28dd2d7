"""Edited model code is new work: its fingerprint is an input of training."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from slipstream.artifacts.store import content_key
from slipstream.models.config import ModelConfig, fingerprint_model
from tasks.flyte.stage import describe


def test_the_fingerprint_follows_the_file_and_with_it_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ModelConfig("own_nets:build")
    assert fingerprint_model(config) == ""  # there is no such module; building it says so
    keys = set()
    for source in ("def build(signature): ...\n", "def build(signature): pass\n"):
        (tmp_path / "own_nets.py").write_text(source)
        found = fingerprint_model(config)
        assert found == xxhash.xxh3_128_hexdigest(source.encode())
        keys.add(content_key("train", "v", {"model": describe(config), "code": describe(found)}))
    assert len(keys) == 2
    assert fingerprint_model(ModelConfig("mlp")) == ""
