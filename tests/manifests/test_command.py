"""``slipstream manifests``: atomic output directory, messages, and one line of error."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slipstream.operations.manifests.build import MARK
from slipstream.operations.manifests.command import main
from tests.support import REPOSITORY
from tests.support.wording import line_with, same_wording


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one line of a mistake."""
    ended = called(*arguments)
    assert ended.exit_code == 1 and ended.output.count("\n") == 1, ended.output
    return ended.output


def contents(directory: Path) -> dict[str, bytes]:
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def test_it_lists_what_it_wrote_and_what_each_is_for(tmp_path: Path) -> None:
    ended = called("a100-spot", "--out", tmp_path / "out", "--serve")
    assert ended.exit_code == 0, ended.output
    lines = ended.output.splitlines()
    assert lines[0] == f"{tmp_path / 'out'}, for a100-spot on EKS:"
    listed = [line.split()[0] for line in lines[2 : 2 + len(contents(tmp_path / "out"))]]
    assert sorted(listed) == list(contents(tmp_path / "out"))
    assert f"apply: kubectl apply -f {tmp_path / 'out'}" in lines
    assert any(line.startswith("assumed: Amazon's nodes") for line in lines)
    assert "StaticCapacity" not in ended.output
    h100 = called("h100-efa-spot", "--out", tmp_path / "h100").output
    same_wording(line_with("StaticCapacity", h100))
    assert h100.count("--replicas=2, as Karpenter does not create nodes for hugepages-2Mi\n") == 2


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = called("a100-spot", "--out", "cluster", "--cluster", "prod", "--serve").output
    assert said in (REPOSITORY / "docs/manifests.md").read_text(encoding="utf-8")


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    for profile in ("l4-spot", "mi300x"):
        said = called(profile, "--out", tmp_path / profile).output
        assert said.count("not included: ") == 2 and "helm" not in said


def test_plugins_of_adapters_are_the_users_matter(tmp_path: Path) -> None:
    assert "aws-efa-k8s-device-plugin" in called("h100-efa-spot", "--out", tmp_path / "h100").output
    (tmp_path / "mine.toml").write_text('[distributed]\ngpu = "1"\nrdma = { "rdma/hca" = "1" }\n')
    said = called(tmp_path / "mine.toml", "--out", tmp_path / "mine").output
    assert "not included: the device plugin for rdma/hca\n" in said and "aws-efa" not in said


def test_the_same_call_writes_the_same_bytes_and_another_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    called("a100-spot", "--out", out, "--serve")
    first = contents(out)
    called("a100-spot", "--out", out, "--serve")
    assert contents(out) == first and "60-triton.yaml" in first
    called("mi300x", "--out", out)
    called("mi300x", "--out", tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")
    assert all(text.startswith(MARK.encode()) for text in first.values())
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["fresh", "out"]


def test_names_of_the_cluster_are_the_users(tmp_path: Path) -> None:
    called(
        "a100-spot",
        "--out",
        tmp_path / "out",
        "--project",
        "churn",
        "--cluster",
        "prod-1",
        "--serve",
        "--models",
        "gs://m",
    )
    text = b"".join(contents(tmp_path / "out").values()).decode()
    assert 'namespace: "churn-production"' in text and "flytesnacks" not in text
    assert 'role: "KarpenterNodeRole-prod-1"' in text and "--model-repository=gs://m" in text


def test_a_directory_with_others_files_is_refused_and_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "apps").mkdir(parents=True)
    (out / "apps/mine.yaml").write_text("kind: Namespace\n")
    line = refused("a100-spot", "--out", out)
    same_wording(line)
    assert list(contents(out)) == ["apps/mine.yaml"]
    called("a100-spot", "--out", tmp_path / "other")
    (tmp_path / "other/10-karpenter.yaml").write_text("kind: NodePool\n")
    same_wording(refused("a100-spot", "--out", tmp_path / "other"))


def test_the_ground_that_one_stands_on_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", tmp_path, tmp_path.parent):
        same_wording(refused("a100-spot", "--out", out))
    assert not list(tmp_path.iterdir()) and called("a100-spot", "--out", "below").exit_code == 0


def test_an_empty_directory_is_taken_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert called("mi300x", "--out", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink() and contents(tmp_path / "empty")


def test_a_disk_that_is_full_in_the_middle_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called("a100-spot", "--out", tmp_path / "out")
    before, write_text, asked = contents(tmp_path / "out"), Path.write_text, list[Path]()

    def full(path: Path, *arguments: Any, **named: Any) -> int:
        asked.append(path)
        if len(asked) == 4:
            raise OSError(28, os.strerror(28))
        return write_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    same_wording(refused("mi300x", "--out", tmp_path / "out"))
    assert contents(tmp_path / "out") == before and len(asked) == 4
    asked.clear()
    same_wording(refused("mi300x", "--out", tmp_path / "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_if_the_new_cannot_take_its_place_the_old_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called("a100-spot", "--out", tmp_path / "out")
    before, rename = contents(tmp_path / "out"), Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError(13, os.strerror(13))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    assert "Permission denied" in refused("mi300x", "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("profile", ["local", "cpu-cluster"])
def test_a_profile_without_gpu_is_one_line(profile: str, tmp_path: Path) -> None:
    line = refused(profile, "--out", tmp_path / "out")
    same_wording(line)
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    same_wording(refused("a100", "--out", tmp_path / "out"))
    same_wording(refused(tmp_path / "absent.toml", "--out", tmp_path / "out"))
    (tmp_path / "file").touch()
    same_wording(refused("a100-spot", "--out", tmp_path / "file"))
    same_wording(refused("a100-spot", "--out", tmp_path / "out", "--project", "Churn"))
    same_wording(refused("a100-spot", "--out", tmp_path / "out", "--cluster", ""))
    assert "expected --serve" in refused("a100-spot", "--out", tmp_path / "out", "--keda")
    assert not (tmp_path / "out").exists()
