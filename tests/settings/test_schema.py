"""The JSON Schema for editors agrees with the program about ``run.yaml``."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from slipstream.config import RunConfig
from slipstream.shared.errors import UserError
from slipstream.shared.settings import to_dict
from tests.support import REPOSITORY

SHIPPED = (REPOSITORY / "run.schema.json").read_text(encoding="utf-8")
SCHEMA: dict[str, Any] = json.loads(SHIPPED)


def accepts(data: Any) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(data)


def test_the_shipped_schema_is_what_the_command_writes() -> None:
    command = [sys.executable, "-m", "slipstream", "schema"]
    written = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert written == SHIPPED, "run: slipstream schema > run.schema.json"
    Draft202012Validator.check_schema(SCHEMA)


def test_it_accepts_the_pages_example_and_the_defaults() -> None:
    page = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")
    example = yaml.safe_load(page.split("```yaml\n# run.yaml", 1)[1].split("```", 1)[0].split("\n", 1)[1])
    assert len(example) == 5 and accepts(example)
    RunConfig.from_dict(example)
    assert accepts(to_dict(RunConfig())) and accepts({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"trainin": {}},
        {"training": {"epoch": 3}},
        {"data": {"split": {"sed": 1}}},
        {"training": {"epochs": 0}},
        {"training": {"epochs": "3"}},
        {"training": {"warmup": 1}},
        {"training": {"precision": "fp8"}},
        {"data": {"types": {"zip": "zipcode"}}},
        {"collectives": {"operations": ["gossip"]}},
    ],
)
def test_it_refuses_what_the_program_refuses(wrong: dict[str, Any]) -> None:
    assert not accepts(wrong)
    with pytest.raises(UserError):
        RunConfig.from_dict(wrong)


def test_every_setting_is_described() -> None:
    silent = [
        f"{name}.{setting}"
        for name, section in SCHEMA["$defs"].items()
        for setting, node in section["properties"].items()
        if not node.get("description")
    ]
    assert not silent
