"""The check of nodes as Flyte tasks: placement, the deck of all nodes, and the result."""

from pathlib import Path

import pytest

from slipstream.operations.doctor import node
from slipstream.operations.doctor.archive import read_package
from slipstream.operations.doctor.findings import NodeReading
from tasks import doctor as task
from workflows.doctor import check_nodes

BAD = NodeReading("/dev/shm", "<64 MiB>", "too small")


def test_it_is_placed_as_training_and_never_cached(archive: Path) -> None:
    made = read_package(archive)
    check, train = made.tasks["tasks.doctor.check_node"], made.tasks["tasks.train.train"]
    assert check.type == "python-task" and made.tasks["tasks.doctor.show_nodes"].metadata.generates_deck.value
    assert not check.metadata.discoverable and not check.metadata.discovery_version
    assert check.extended_resources.gpu_accelerator.device == train.extended_resources.gpu_accelerator.device
    assert check.k8s_pod.pod_spec["tolerations"] == train.k8s_pod.pod_spec["tolerations"]
    mapped, _ = made.workflows["workflows.doctor.check_nodes"].nodes
    pods = {binding.var: binding.binding for binding in mapped.array_node.node.inputs}["pod"]
    assert len(pods.collection.bindings) == 2


def test_its_deck_has_the_table_and_its_result_the_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decks: dict[str, str] = {}
    monkeypatch.setattr(task, "Deck", decks.__setitem__)
    monkeypatch.setattr(node, "read_node", lambda store, endpoint: [NodeReading("CPU", f"2 of {store}"), BAD])
    (found,) = check_nodes(store="mine")
    assert found.problems == ["/dev/shm: too small"] and f"<h2>{found.host}</h2>" in decks["Nodes"]
    table = "".join(line.strip() for line in decks["Nodes"].splitlines())
    assert "<td>CPU</td><td>2 of mine</td><td></td>" in table
    assert "<td>&lt;64 MiB&gt;</td><td>too small</td>" in table
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["what", "CPU", "/dev/shm"]
