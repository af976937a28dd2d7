"""The whole proof passes against stand-ins that run every pod, and every pod loss really happens."""

from dataclasses import replace
from pathlib import Path

import pytest
from flyteidl.core.execution_pb2 import WorkflowExecution

from slipstream.flyte.remote.backend import FlyteBackend
from slipstream.operations.proofs.cluster import command, proof
from slipstream.operations.proofs.cluster.kubernetes import Kubernetes
from slipstream.operations.proofs.cluster.proof import CONFIG, ClusterProof
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from tests.support.enacted_flyte import EnactedFlyte, kubectl_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.flyte_admin import BUCKET, serving, write_config

PROFILE = """
extends = "local"
[default]
retries = 4
[stages.prepare]
nodes = 2
[stages.train]
nodes = 2
processes = 1
cpu = "1"
[stages.collectives]
processes = 1
"""


@pytest.mark.prove
def test_all_of_it_holds(server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "two-pods.toml"
    profile.write_text(PROFILE)
    (tmp_path / "pods").mkdir()
    (tmp_path / "proof").mkdir()
    flyte = EnactedFlyte(S3Bucket(server.url, BUCKET), tmp_path / "pods")
    monkeypatch.setattr(proof, "FILES", 2)  # each is parsed, encoded and merged by a pod of its own
    said: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        said.append(line)

    with serving(flyte), kubectl_for(flyte, tmp_path / "bin") as path:
        monkeypatch.setenv("PATH", path, prepend=":")
        config = write_config(tmp_path / "flyte.yaml", flyte.endpoint)
        theirs = FlyteBackend(config, "flytesnacks", "development", "slipstream cluster-proof")
        kubernetes = Kubernetes("flytesnacks-development")
        kubernetes.context()
        assert theirs.version() == "v1.16.8"
        small = replace(CONFIG, training=replace(CONFIG.training, epochs=120))
        whole = ClusterProof(
            "proof-t", theirs, kubernetes, "registry.example/slipstream:test", str(profile), 2, say, 10.0, small
        )
        rows = whole.run(tmp_path / "proof")
    print(command.results_table(rows))
    assert [row.act for row in rows if not row.held] == [], "\n".join(said)
    assert len(rows) == 9
    assert (
        sum(line.startswith(("  deleted proof", "  evicted", "  killed")) or " deleted " in line for line in said) >= 5
    )
    assert set(flyte.phases) == {f"proof-t-{number}" for number in range(8)}
    assert WorkflowExecution.RUNNING not in flyte.phases.values()
    struck = [pod for _, _, pod in flyte.pods() if pod.deleted or pod.exit_code == 247]
    assert len(struck) >= 5
