"""Charts in pods need no fonts of the system, so no library looks for any."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.rendering import primary_container

#: As in an image that has fontconfig's programs but not its configuration.
FC_LIST = '#!/bin/sh\necho >> "$ASKED"\necho "Fontconfig error: Cannot load default config file" >&2\n'
CHART = """
from types import SimpleNamespace
from slipstream.pipeline.report.pages.charts import roc_curve
print(roc_curve(SimpleNamespace(fpr=[0, 1], tpr=[0, 1]), "yes"))
"""


@pytest.mark.prove
@pytest.mark.parametrize("in_a_pod", [True, False])
def test_a_pod_asks_for_no_fonts(
    in_a_pod: bool, package_for: Callable[[str], RegistrationArchive], tmp_path: Path
) -> None:
    """Outside of pods Matplotlib does: what it finds is kept for all programs of a home directory."""
    (tmp_path / "fc-list").write_text(FC_LIST)
    (tmp_path / "fc-list").chmod(0o755)
    asked = tmp_path / "asked"
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "MPLCONFIGDIR": str(tmp_path / "empty")}
    if in_a_pod:
        environment |= primary_container(package_for("local").tasks["tasks.report.report"]).environment
    ended = subprocess.run(
        [sys.executable, "-c", CHART], env={**environment, "ASKED": str(asked)}, capture_output=True, text=True
    )
    assert ended.stdout.startswith("<svg"), ended.stderr
    assert asked.exists() != in_a_pod and ("Fontconfig" in ended.stderr) != in_a_pod
