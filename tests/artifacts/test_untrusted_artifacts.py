"""Untrusted artifacts: their names lead to no other file that is read, mapped, linked or copied."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slipstream.operations.plan.measured import read_evidence
from slipstream.pipeline.report.run_directory import copy_model, link_artifact
from slipstream.shared.artifacts import exchange
from slipstream.shared.artifacts.format import MANIFEST, Artifact, ArtifactWriter, DamagedArtifact
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.streamed import STUB, open_prepared
from slipstream.shared.errors import UserError
from slipstream.shared.models.trained import TrainedModel
from tests.support.command_line import one_message, run_in
from tests.support.tokens import small_transformer, token_data
from tests.support.untrusted import SECRET, download_from_hub, exchange_at_open, make_secret, replace_by_link
from tests.support.wording import refuses

NAMES = ("rows.bin", "below/facts.json")


def write(directory: Path) -> Artifact:
    """An artifact whose files have the size of the secret."""
    writer = ArtifactWriter(directory)
    for name in NAMES:
        writer.write_bytes(name, b"x" * len(SECRET))
    return writer.finish("export", {})


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
def test_it_is_not_opened_with_a_link_that_leads_out(name: str, tmp_path: Path) -> None:
    """Even one to the very bytes."""
    path = write(tmp_path / "made").directory / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with refuses(DamagedArtifact, match=f"{name}:"):
        Artifact.open(tmp_path / "made", "export")


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
def test_it_is_not_opened_with_a_device_or_a_pipe(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "made").directory / name
    replace_by_link(path, "/dev/zero")
    with refuses(DamagedArtifact, match=f"{name}:"):
        Artifact.open(tmp_path / "made", "export")
    path.unlink()
    os.mkfifo(path)
    with refuses(DamagedArtifact, match=f"{name}:"):
        Artifact.open(tmp_path / "made", "export")


def test_a_folder_that_leads_out(tmp_path: Path) -> None:
    write(tmp_path / "made")
    (tmp_path / "made/below").rename(tmp_path / "elsewhere")
    (tmp_path / "made/below").symlink_to("../elsewhere")
    with refuses(DamagedArtifact, match=r"below/facts\.json:"):
        Artifact.open(tmp_path / "made", "export")


def test_links_inside_of_it_are_followed(tmp_path: Path) -> None:
    fingerprint = write(tmp_path / "made").fingerprint
    (tmp_path / "made/rows.bin").rename(tmp_path / "made/moved")
    (tmp_path / "made/rows.bin").symlink_to("moved")
    (tmp_path / "named").symlink_to("made")
    artifact = Artifact.open(tmp_path / "named", "export").check().check_sha256()
    assert artifact.fingerprint == fingerprint and artifact.read_bytes("rows.bin") == b"x" * len(SECRET)
    for put in (link_artifact, copy_model):
        put(artifact, tmp_path / put.__name__)
        assert not any(path.is_symlink() for path in (tmp_path / put.__name__).rglob("*"))


def test_from_hugging_faces_cache(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data")
    snapshot = download_from_hub(tmp_path / "data", tmp_path / "cache")
    found = PreparedData.open(snapshot)
    assert found.artifact.fingerprint == data.artifact.fingerprint
    assert np.array_equal(found.split("train"), data.split("train"))
    link_artifact(found.artifact, tmp_path / "linked")
    assert Artifact.open(tmp_path / "linked", "prepare").check() and not (tmp_path / "linked" / MANIFEST).is_symlink()


@pytest.mark.parametrize(
    "use",
    [
        lambda artifact, out: artifact.read_bytes("rows.bin"),
        lambda artifact, out: artifact.check(),
        lambda artifact, out: artifact.check_sha256(),
        lambda artifact, out: artifact.open_file("rows.bin").read(),
        lambda artifact, out: artifact.link_file("rows.bin", out),
        lambda artifact, out: artifact.copy_file("rows.bin", out),
        lambda artifact, out: link_artifact(artifact, out),
        lambda artifact, out: ArtifactWriter(out).link(
            artifact.directory / "rows.bin", "rows.bin", artifact.files["rows.bin"], artifact.directory
        ),
    ],
)
def test_a_file_that_is_exchanged_while_it_is_opened(
    use: Callable[[Artifact, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = write(tmp_path / "made")
    exchanged = exchange_at_open(monkeypatch, tmp_path / "made/rows.bin", make_secret(tmp_path))
    with refuses(DamagedArtifact, match=r"rows\.bin:"):
        use(artifact, tmp_path / "out")
    assert exchanged and not (tmp_path / "out").is_file() and not (tmp_path / "out/rows.bin").exists()


def test_rows_that_are_exchanged_are_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = token_data(tmp_path / "data")
    exchanged = exchange_at_open(monkeypatch, tmp_path / "data/train-00000.rows", make_secret(tmp_path))
    with refuses(DamagedArtifact, match=r"train-00000\.rows:"):
        data.mapped("train-00000.rows")
    assert exchanged


def test_neither_a_stub_nor_a_value_is_read_through_a_link(tmp_path: Path) -> None:
    token_data(tmp_path / "data")
    (tmp_path / "data" / STUB).symlink_to(make_secret(tmp_path))
    with refuses(DamagedArtifact, match=f"{STUB}:"):
        open_prepared(tmp_path / "data")
    directory = exchange.write_part(tmp_path / "part")
    (directory / exchange.VALUE).symlink_to(make_secret(tmp_path))
    with refuses(DamagedArtifact):
        exchange.read_part(directory, type("Value", (), {}))


def test_weights_are_not_read_through_a_link(tmp_path: Path) -> None:
    trained = small_transformer(tmp_path / "trained", token_data(tmp_path / "data")).directory
    (trained / "best.safetensors").rename(tmp_path / "weights")
    (trained / "best.safetensors").symlink_to("../weights")
    with refuses(UserError, match=r"best\.safetensors:"):
        TrainedModel.open(trained)
    replace_by_link(trained / MANIFEST, "/dev/zero")
    with refuses(UserError):
        read_evidence([str(trained)])


@pytest.mark.parametrize(("option", "name"), [("--model", "last.safetensors"), ("--data", "statistics.json")])
def test_pyflyte_says_it_in_one_line(option: str, name: str, tmp_path: Path) -> None:
    data = token_data(tmp_path / "data")
    small_transformer(tmp_path / "trained", data)
    path = tmp_path / ("data" if option == "--data" else "trained") / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("../elsewhere")
    ended = run_in(tmp_path, "--model", "trained", "--data", "data", workflow="export_model")
    assert ended.returncode == 1 and "Traceback" not in ended.stdout
    said = one_message(ended.stdout)
    assert f"{option}: " in said and f"{name}: leads to" in said, said
