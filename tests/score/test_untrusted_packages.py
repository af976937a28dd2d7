"""Untrusted packages and registries: verified before they are copied, without any other file."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.package import copies
from slipstream.pipeline.export.package.copies import copy_package
from slipstream.pipeline.export.package.files import MANIFEST, BadPackage
from slipstream.pipeline.export.package.triton import write_repository
from slipstream.pipeline.promote.store import Registry, package_version
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import find_model
from slipstream.pipeline.score.publish import score_data
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.storage import s3
from tests.support.command_line import one_message, run_in
from tests.support.faulty_s3 import FaultyS3
from tests.support.promotions import flip
from tests.support.scoring import rows
from tests.support.untrusted import exchange_at_open, holds_secret, make_secret, replace_by_link
from tests.support.wording import refuses, same_wording

LINKED = "a symbolic link; expected the file or directory itself. Export or copy the model again"


@pytest.fixture
def model(served: Registry, tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(served.uri).parent / "package", tmp_path / "model"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all files that are copied."""
    names, right = list[str](), copies.copy_untrusted

    def noted(directory: Path, name: str, target: Path, size: int) -> None:
        names.append(name)
        right(directory, name, target, size)

    monkeypatch.setattr(copies, "copy_untrusted", noted)
    return names


def refusal(tmp_path: Path, registry: str = "", package: str = "") -> str:
    rows(9).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(UserError) as refused:
        score_data(
            registry,
            str(tmp_path / "rows.csv"),
            str(tmp_path / "out"),
            DataConfig(),
            ScoringConfig(),
            package=package,
            workers=1,
        )
    assert "\n" not in refused.value.message and not (tmp_path / "out").exists()
    return refused.value.message


def to_zero(model: Path) -> str:
    (model / "z.bin").symlink_to("/dev/zero")
    return "z.bin"


def to_its_own_bytes_elsewhere(model: Path) -> str:
    shutil.copyfile(model / "statistics.json", model.parent / "other.json")
    replace_by_link(model / "statistics.json", "../other.json")
    return "statistics.json"


def to_its_own_bytes_inside(model: Path) -> str:
    (model / "statistics.json").rename(model / "other.json")
    (model / "statistics.json").symlink_to("other.json")
    return "statistics.json"


def manifest(model: Path) -> str:
    (model / MANIFEST).rename(model.parent / MANIFEST)
    (model / MANIFEST).symlink_to(f"../{MANIFEST}")
    return MANIFEST


@pytest.mark.parametrize("change", [to_zero, to_its_own_bytes_elsewhere, to_its_own_bytes_inside, manifest])
def test_scoring_refuses_each_link_that_check_refuses_and_copies_nothing(
    change: Callable[[Path], str], model: Path, copied: list[str], tmp_path: Path
) -> None:
    name = change(model)
    said = refusal(tmp_path, package=str(model))
    assert said == f"{model}: {name}: {LINKED}" and not copied
    with pytest.raises(BadPackage) as refused:
        check_package(model)
    assert str(refused.value) == f"{model / name}: {LINKED}"


def test_pyflyte_says_it_in_one_line(model: Path, tmp_path: Path) -> None:
    to_zero(model)
    rows(9).to_csv(tmp_path / "rows.csv", index=False)
    arguments = ("--model", "model", "--data", "rows.csv", "--output", "out")
    ended = run_in(tmp_path, *arguments, workflow="score", file="scoring")
    assert ended.returncode == 1 and "Traceback" not in ended.stdout
    assert f"model: z.bin: {LINKED}" in one_message(ended.stdout)


def test_a_package_is_verified_before_it_is_copied(model: Path, copied: list[str], tmp_path: Path) -> None:
    flip(model / "model.onnx")
    assert not copied
    same_wording(refusal(tmp_path, package=str(model)))
    flip(model / "model.onnx")
    (model / "more").write_bytes(b"")
    assert not copied
    same_wording(refusal(tmp_path, package=str(model)))
    (model / "more").unlink()
    copy_package(str(model), tmp_path / "copy")
    assert check_package(tmp_path / "copy") and len(copied) == len(
        [path for path in model.rglob("*") if path.is_file()]
    )


def test_what_comes_after_the_check_is_not_copied(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = copies.check_files

    def check_then_add(directory: Path) -> str:
        found = right(directory)
        if directory == model:
            (model / "z.bin").symlink_to("/dev/zero")
            (model / "more").write_text("more")
        return found

    monkeypatch.setattr(copies, "check_files", check_then_add)
    copy_package(str(model), tmp_path / "copy")
    assert (model / "z.bin").is_symlink() and not {"z.bin", "more"} & {p.name for p in (tmp_path / "copy").iterdir()}


def test_a_file_that_grows_after_the_check_is_not_copied_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, size = copies.check_files, (model / "model.onnx").stat().st_size

    def check_then_grow(directory: Path) -> str:
        found = right(directory)
        with (model / "model.onnx").open("ab") as file:
            file.truncate(1 << 40)
        return found

    monkeypatch.setattr(copies, "check_files", check_then_grow)
    with pytest.raises(BadPackage) as refused:
        copy_package(str(model), tmp_path / "copy")
    same_wording(str(refused.value).replace(f"{size:,}", "<size>"))
    assert (tmp_path / "copy/model.onnx").stat().st_size == size


def test_a_file_that_is_exchanged_while_it_is_opened(
    model: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged = exchange_at_open(monkeypatch, model / "statistics.json", make_secret(tmp_path))
    assert "statistics.json: leads to" in refusal(tmp_path, package=str(model))
    assert exchanged and not holds_secret(scratch)


def test_the_address_of_a_package_may_be_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(model)
    assert find_model("", str(tmp_path / "latest")).version == package_version(model)


def test_a_registry_with_links_that_lead_out(served: Registry, tmp_path: Path, scratch: Path) -> None:
    registry = Path(shutil.copytree(served.uri, tmp_path / "registry"))
    (version,) = (registry / "versions").iterdir()
    where = f"{registry}/versions/{version.name}: the promoted model is damaged: "
    (version / "z.bin").symlink_to("/dev/zero")
    assert refusal(tmp_path, str(registry)) == f"{where}z.bin: {LINKED}; restore it"
    (version / "z.bin").unlink()
    version.rename(tmp_path / "elsewhere")
    version.symlink_to(tmp_path / "elsewhere")
    assert "outside of" in refusal(tmp_path, str(registry))
    version.unlink()
    (tmp_path / "elsewhere").rename(version)
    pointer = next((registry / "promoted").iterdir())
    pointer.rename(tmp_path / "pointer.json")
    pointer.symlink_to(tmp_path / "pointer.json")
    assert f"{pointer}: leads to {tmp_path / 'pointer.json'}, outside of {registry}" in refusal(tmp_path, str(registry))


def test_what_is_promoted_is_copied_by_its_manifest(model: Path, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    to_zero(model)
    with refuses(UserError):
        registry.add(model)
    with refuses(UserError):
        write_repository(model, tmp_path / "triton")
    assert not (tmp_path / "triton").exists() and not registry.storage.list()


def test_of_a_store_nothing_is_fetched_that_no_manifest_lists(
    model: Path, tmp_path: Path, scratch: Path, store: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, content: bytes) -> None:
        s3.client().put_object(Bucket="bucket", Key=f"{tmp_path.name}/model/{name}", Body=content)

    address = f"s3://bucket/{tmp_path.name}/model"
    for path in model.rglob("*"):
        if path.is_file():
            put(path.relative_to(model).as_posix(), path.read_bytes())
    assert find_model("", address).version == package_version(model)
    fetched = list[str]()
    storage = type(copies.storage_for(address))
    monkeypatch.setattr(storage, "get", lambda self, key, directory: fetched.append(key))
    put("z.bin", b"0" * 1000)
    same_wording(refusal(tmp_path, package=address))
    s3.client().delete_object(Bucket="bucket", Key=f"{tmp_path.name}/model/z.bin")
    put("model.onnx", b"0" * 1000)
    size = (model / "model.onnx").stat().st_size
    same_wording(refusal(tmp_path, package=address).replace(str(size), "<size>"))
    assert not fetched
