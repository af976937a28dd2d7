"""No library reports its use: only inputs and outputs cause network traffic."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.flyte.metadata import pod_environment
from slipstream.shared.profiles.profile import current_profile
from tests.support.command_line import PYFLYTE, TERMINAL, TRAINING
from tests.support.dockerfile import REPOSITORY, instructions
from tests.support.recorded_network import impossible, recorded

OPT_OUT = "ORT_DISABLE_TELEMETRY"
#: The variables that silence ONNX Runtime; the tests' own process has the first from ``tasks``.
SILENCING = (OPT_OUT, "CI", "GITHUB_ACTIONS", "TF_BUILD", "ORT_RUNNING_UNIT_TESTS", "TORCH_CPP_LOG_LEVEL")
SESSION = """
import onnxruntime
from onnx import TensorProto, helper
values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", values[:1], values[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
onnxruntime.InferenceSession(model.SerializeToString())
"""


def outside(home: Path) -> dict[str, str]:
    """The environment of a user, with an empty home directory."""
    kept = {name: value for name, value in os.environ.items() if name not in SILENCING}
    return {**kept, **TERMINAL, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize(("before", "traces"), [("", True), ("import slipstream", False)])
def test_onnx_runtime_leaves_no_identifier_in_the_home_directory(before: str, traces: bool, tmp_path: Path) -> None:
    """Without our code it does, which shows that the test looks in the right place."""
    command = [sys.executable, "-c", f"{before}\n{SESSION}"]
    subprocess.run(command, env=outside(tmp_path), cwd=tmp_path, check=True, capture_output=True)
    assert any(path.name == "deviceid" for path in tmp_path.rglob("*")) is traces


def test_pods_and_images_opt_out_before_any_of_our_code_runs() -> None:
    profile = current_profile()
    assert pod_environment(profile, profile.asked("export"), "export")[OPT_OUT] == "1"
    for path in sorted((REPOSITORY / "images").glob("*.Dockerfile")):
        assert any(kind == "ENV" and f"{OPT_OUT}=1" in value for kind, value in instructions(path)), path.name


@pytest.mark.prove
def test_the_main_job_sends_nothing_and_prints_no_line_of_a_library(tmp_path: Path) -> None:
    if reason := impossible():
        pytest.skip(reason)
    quick = '{"training": {"epochs": 2}, "collectives": {"largest": 4096, "budget": 0.01}}'
    command = [str(PYFLYTE), "run", str(TRAINING), "train_and_export", "--config", quick]
    ended, sent = recorded(command, tmp_path, outside(tmp_path))
    assert ended.returncode == 0, ended.stdout
    assert sent == []
    assert not re.search(r"socket\.cpp|telemetry|\[W\d{4}", ended.stdout), ended.stdout


@pytest.mark.prove
def test_the_recorder_sees_what_onnx_runtime_would_send(tmp_path: Path) -> None:
    """The counter-proof: without the variable its uploader asks for its maker's address within seconds."""
    if reason := impossible():
        pytest.skip(reason)
    command = [sys.executable, "-c", f"{SESSION}\nimport time; time.sleep(25)"]
    ended, sent = recorded(command, tmp_path, outside(tmp_path))
    assert ended.returncode == 0, ended.stdout
    assert [packet for packet in sent if "microsoft" in packet]
