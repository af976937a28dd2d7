"""Bad input is one line with problem, place and remedy; nothing is published."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.export.package.files import digest_line
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.publish import score_data
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from tests.support.damaged_records import damages
from tests.support.promotions import flip
from tests.support.scoring import rows
from tests.support.wording import refuses, same_wording


def refusal(tmp_path: Path, registry: str, data: Path | str, package: str = "", keep: Any = (), **reading: Any) -> str:
    with pytest.raises(UserError) as refused:
        score_data(
            registry,
            str(data),
            str(tmp_path / "out"),
            DataConfig(**reading),
            ScoringConfig(keep=list(keep)),
            package=package,
            workers=1,
        )
    assert not list(tmp_path.glob("out/published/*"))
    assert "\n" not in refused.value.message
    return refused.value.message


def csv(tmp_path: Path, frame: pd.DataFrame, name: str = "rows.csv") -> Path:
    frame.to_csv(tmp_path / name, index=False)
    return tmp_path / name


def test_an_empty_registry(tmp_path: Path) -> None:
    said = refusal(tmp_path, str(tmp_path / "registry"), csv(tmp_path, rows(9)))
    same_wording(said)


@pytest.mark.prove
def test_neither_a_registry_nor_a_package_or_both(served: Registry, tmp_path: Path) -> None:
    data = csv(tmp_path, rows(9))
    same_wording(refusal(tmp_path, "", data))
    same_wording(refusal(tmp_path, served.uri, data, package="model"))


def test_a_package_that_is_none_or_was_changed(served: Registry, tmp_path: Path) -> None:
    data = csv(tmp_path, rows(9))
    same_wording(refusal(tmp_path, "", data, package=str(tmp_path / "nothing")))
    model = tmp_path / "model"
    shutil.copytree(Path(served.uri).parent / "package", model)
    flip(model / "model.raw.onnx")
    same_wording(refusal(tmp_path, "", data, package=str(model)))


def test_a_model_that_is_not_signed_by_the_key(served: Registry, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = Ed25519PrivateKey.generate().public_key()
    key = tmp_path / "public.pem"
    key.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with refuses(UserError):
        score_data(
            served.uri,
            str(csv(tmp_path, rows(9))),
            str(tmp_path / "out"),
            DataConfig(),
            ScoringConfig(public_key=str(key)),
        )


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_column_that_is_missing(served: Registry, tmp_path: Path, suffix: str) -> None:
    frame = rows(60).drop(columns="visits")
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "parquet":
        frame.to_parquet(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True, date_format="iso")
    said = refusal(tmp_path, served.uri, path)
    assert "'visits'" in said
    same_wording(said)


def test_a_column_of_another_type(served: Registry, tmp_path: Path) -> None:
    frame = rows(60)
    frame["visits"] = pd.Timestamp("2026-01-01")
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    said = refusal(tmp_path, served.uri, tmp_path / "rows.parquet")
    same_wording(said)
    frame["visits"] = "many"
    said = refusal(tmp_path, served.uri, csv(tmp_path, frame))
    same_wording(said)


def test_no_rows(served: Registry, tmp_path: Path) -> None:
    said = refusal(tmp_path, served.uri, csv(tmp_path, rows(9).head(0)))
    same_wording(said)
    empty = pa.Table.from_pandas(rows(9), preserve_index=False).slice(0, 0)
    pq.write_table(empty, tmp_path / "none.parquet")
    same_wording(refusal(tmp_path, served.uri, tmp_path / "none.parquet"))


def test_output_inside_the_data(served: Registry, tmp_path: Path) -> None:
    csv(tmp_path, rows(9))
    with refuses(UserError):
        score_data(served.uri, str(tmp_path), str(tmp_path / "out"), DataConfig(), ScoringConfig())
    with refuses(UserError):
        score_data(served.uri, "s3://bucket/data", "s3://bucket/data/out", DataConfig(), ScoringConfig())


def test_a_model_without_raw_columns_whose_preparation_cannot_stand_in(served: Registry, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(served.uri).parent / "package", model)
    signature = json.loads((model / "signature.json").read_text())
    statistics = json.loads((model / "statistics.json").read_text())
    (model / "signature.json").write_text(json.dumps({**signature, "raw": None, "no_raw": "of an earlier version"}))
    del statistics["types"]
    (model / "statistics.json").write_text(json.dumps(statistics))
    vouched(model, "signature.json", "statistics.json")
    said = refusal(tmp_path, "", csv(tmp_path, rows(9)), package=str(model))
    same_wording(said)


@pytest.mark.parametrize("raw", [True, False])
def test_statistics_that_no_export_wrote_are_one_line(served: Registry, raw: bool, tmp_path: Path) -> None:
    model = shutil.copytree(Path(served.uri).parent / "package", tmp_path / "model")
    if not raw:
        signature = json.loads((model / "signature.json").read_text())
        (model / "signature.json").write_text(json.dumps({**signature, "raw": None, "no_raw": "of an earlier version"}))
    good, refused = (model / "statistics.json").read_bytes(), 0
    for what, content, never in [*damages(good)][::7]:
        (model / "statistics.json").write_bytes(content)
        try:
            assert ServedModel(model).by and not never, f"{what} was taken"
        except UserError as error:
            assert "\n" not in error.message, what
            refused += 1
    assert refused > 20


def vouched(model: Path, *names: str) -> None:
    """Update the manifest, as the author of such a package would."""
    import hashlib

    manifest = json.loads((model / "manifest.json").read_text())
    for name in names:
        content = (model / name).read_bytes()
        manifest["files"][name] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (model / "manifest.json").write_text(json.dumps(manifest))
    (model / "manifest.sha256").write_text(digest_line((model / "manifest.json").read_bytes()))


@pytest.mark.prove
def test_a_table_for_a_model_of_images_and_images_for_one_of_a_table(
    served: Registry, of_images: Registry, tmp_path: Path
) -> None:
    from PIL import Image

    same_wording(refusal(tmp_path, of_images.uri, csv(tmp_path, rows(9))))
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "one.png")
    same_wording(refusal(tmp_path, served.uri, tmp_path / "one.png"))
    said = refusal(tmp_path, of_images.uri, tmp_path / "one.png")
    same_wording(said)
    same_wording(refusal(tmp_path, of_images.uri, tmp_path / "one.png", keep=["id"]))


def test_a_column_to_keep_that_is_missing_or_whose_name_is_taken(served: Registry, tmp_path: Path) -> None:
    data = csv(tmp_path, rows(9))
    same_wording(refusal(tmp_path, served.uri, data, keep=["di"]))
    same_wording(refusal(tmp_path, served.uri, data, keep=["label"]))
    with refuses(UserError):
        ScoringConfig(keep=["id", "id"])


def test_other_marks_than_those_of_the_model(served: Registry, tmp_path: Path) -> None:
    said = refusal(tmp_path, served.uri, csv(tmp_path, rows(9)), decimal=",", thousands=".")
    assert "data.decimal:" in said
    same_wording(said)


def test_a_file_that_changes_meanwhile(served: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = csv(tmp_path, rows(50))
    from slipstream.pipeline.score import publish

    def changed(job: Any) -> Any:
        data.write_text(data.read_text() + "\n")
        return original(job)

    original = publish.score_part
    monkeypatch.setattr(publish, "score_part", changed)
    said = refusal(tmp_path, served.uri, data)
    assert str(data) in said and "chang" in said
