"""``train_and_promote``: the first model is promoted; a worse one is refused with the reason."""

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.storage import storage_for
from tests.support.command_line import one_message, run_in
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.tables import table_text


def config(epochs: int, rate: float) -> str:
    quick = {
        "training": {"epochs": epochs, "batch_size": 64, "learning_rate": rate},
        "export": EXPORT,
        "collectives": NETWORK,
    }
    return json.dumps({**quick, "promotion": {"max_loss": 10}})


@pytest.mark.parametrize(
    ("registry", "promotion", "message"),
    [
        ("", {}, "registry: is empty; expected a directory or a store's address"),
        ("ftp://models", {}, "ftp:// is not supported; expected a path"),
        ("registry", {"signing_key": "none.pem"}, "none.pem: cannot be read (No such file or directory)"),
        (
            "registry",
            {"max_loss": 200},
            "promotion.max_loss: 200 is not allowed; expected at least -100 and at most 100",
        ),
    ],
)
def test_a_registry_that_cannot_be_used_is_found_first(
    registry: str, promotion: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = json.dumps({"promotion": promotion})
    ended = run_in(tmp_path, "--registry", registry, "--config", settings, workflow="train_and_promote")
    assert ended.returncode == 1 and message in ended.stdout
    assert not (tmp_path / ".slipstream").exists() and not (tmp_path / "registry").exists()


def test_a_registry_whose_store_ignores_conditions_is_found_first(tmp_path: Path, store: FaultyS3) -> None:
    """Two promotions would replace each other there."""
    store.ignores_conditions = True
    uri = f"s3://bucket/{tmp_path.name}/registry"
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": store.url}
    ended = run_in(tmp_path, "--registry", uri, workflow="train_and_promote", **environment)
    said = one_message(ended.stdout)
    assert ended.returncode == 1 and f"{uri}: the store replaced an existing object" in said
    assert f"slipstream doctor --node --store {uri}" in said and len(store.fired) == 2
    assert not (tmp_path / ".slipstream").exists() and storage_for(uri).list() == []


@pytest.mark.prove
def test_a_model_is_promoted_and_a_worse_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(table_text(900))
    arguments = ("--registry", "registry", "--data", "table.csv", "--target", "y", "--config")

    def run(epochs: int, rate: float) -> str:
        ended = run_in(tmp_path, *arguments, config(epochs, rate), workflow="train_and_promote")
        assert ended.returncode == 0, ended.stdout
        return " ".join(ended.stdout.split())

    first = run(30, 0.005)
    registry = Registry(str(tmp_path / "registry"))
    (pointer,) = registry.history()
    assert f"Promoted version {pointer.version} is in service it is the first in this registry" in first
    check_package(registry.fetch(pointer, tmp_path / "served"))
    (directory,) = (tmp_path / "runs").iterdir()
    check_package(directory / "model")
    page = " ".join((directory / "report.html").read_text().split())
    assert f"In service as version <b>{pointer.version}</b>: it is the first in this registry." in page
    worse = run(1, 1e-7)
    assert f"Promoted no: the promoted model stays against version {pointer.version}: " in worse
    assert registry.history() == [pointer]
    last = max((tmp_path / "runs").iterdir())
    told = json.loads((last / "summary.json").read_text())["promotion"]
    assert not told["promoted"] and pointer.version in told["why"]
    page = unescape(" ".join((last / "report.html").read_text().split()))
    assert f"Not in service, <b>the promoted model stays</b>: {told['why']}." in page
