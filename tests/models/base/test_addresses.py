"""A base by any path: what is stored does not depend on the working directory, and no path enters a key."""

import socket
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

from slipstream.config import RunConfig
from slipstream.flyte.command_line.options import TO_UPLOAD, refuse_local_path
from slipstream.flyte.stage import result_key, section_digest
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.adapters.peft_files import NewAdapter, peft_files
from slipstream.shared.models.base.directory import ModelOrigin, base_address
from slipstream.shared.models.base.shape import with_base_shape
from slipstream.shared.models.config import LoraConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.storage.local import lasting_address, local_path
from tasks import config
from tasks.config import Sections, config_sections
from tests.support.bases import SIGNATURE, make_base
from tests.support.wording import refuses

LORA = LoraConfig(rank=2)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_base(tmp_path / "models/base")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config, "runs_locally", lambda: True)
    return tmp_path


def sections_of(base: str) -> Sections:
    tokenizer = base_address(base)
    data = {"task": "language", "tokenizer": tokenizer, "length": 48}
    return config_sections(RunConfig.from_dict({"model": {"base": base, "lora": {"rank": 2}}, "data": data}))


def test_one_base_under_three_paths_is_stored_absolute_and_has_one_key(places: Path) -> None:
    found = [sections_of(base) for base in ("../models/base", "~/models/base", str(places / "models/base"))]
    assert {Path(each.model.base).resolve() for each in found} == {places / "models/base"}
    assert all(Path(each.model.base).is_absolute() for each in found)
    assert len({(section_digest(each.model), each.model_code) for each in found}) == 1
    keys = [result_key("train", {"model": each.model, "code": each.model_code}) for each in found]
    assert len(set(keys)) == 1
    alone = [result_key("train", {"model": each.model, "code": ""}) for each in found[1:]]
    other = replace(found[0].model, base=str(places / "models/other"))
    assert result_key("train", {"model": other, "code": ""}) not in alone, "without a digest the address counts"
    (places / "models/base/config.json").write_text((places / "models/base/config.json").read_text() + " ")
    assert sections_of("../models/base").model_code != found[0].model_code, "the bytes count"


def test_a_name_is_found_in_hugging_faces_cache_and_nowhere_else(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = places / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: pytest.fail("a connection is opened"))
    model, revision = cache / "models--owner--small", "0" * 40
    (model / "blobs").mkdir(parents=True)
    (model / f"snapshots/{revision}").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(revision)
    for number, file in enumerate(sorted((places / "models/base").iterdir())):
        (model / f"blobs/{number}").write_bytes(file.read_bytes())
        (model / f"snapshots/{revision}/{file.name}").symlink_to(f"../../blobs/{number}")
    found = sections_of("owner/small").model
    assert found.base == str(model / f"snapshots/{revision}")
    assert sections_of(str(places / "models/base")).model_code == ModelOrigin(found).digest
    with refuses(UserError):
        base_address("owner/other")


def test_with_remote_only_a_store_will_do(places: Path) -> None:
    refuse_local_path("--base", "s3://bucket/base", TO_UPLOAD["base"])
    for base in ("owner/small", str(places / "models/base")):
        with refuses(UserError):
            refuse_local_path("--base", base, TO_UPLOAD["base"])


def test_addresses_in_stores_and_unknown_users_are_as_given(places: Path) -> None:
    assert lasting_address("s3://bucket/base") == "s3://bucket/base" and lasting_address("") == ""
    assert local_path("~unknown-user/base") == Path("~unknown-user/base")


def test_peft_opens_the_adapter_from_another_folder(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sections_of("../models/base").model
    shaped = with_base_shape(model, SIGNATURE.inputs[0].shape[0], ModelOrigin(model))
    network = build_model(shaped, SIGNATURE, seed=0, empty=True).network.to_empty(device="cpu")
    tensors = {name: tensor for name, tensor in network.state_dict().items() if is_adapter(name)}
    (places / "adapter").mkdir()
    for name, content in peft_files(NewAdapter(LORA, model.base, tensors)).items():
        (places / "adapter" / name).write_bytes(content)
    (places / "elsewhere").mkdir()
    monkeypatch.chdir(places / "elsewhere")
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(places / "adapter", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(places / "models/base", dtype=torch.float32)
    assert opened.get_base_model().config.hidden_size == theirs.config.hidden_size
