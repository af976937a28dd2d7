"""Node facts from the cloud's metadata server, over real HTTP; a bad server costs a second at most."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from slipstream.shared.machine import description
from slipstream.shared.telemetry import node
from slipstream.shared.telemetry.node import NodeFacts, ask_aws, ask_azure, ask_gcp, node_facts
from tests.support import REPOSITORY
from tests.support.metadata_server import metadata_server
from tests.support.proving import diagonal

ASKERS = {"aws": ask_aws, "gcp": ask_gcp, "azure": ask_azure}
#: How each says "spot" and "not spot".
SPOT = {"aws": ("spot", "on-demand"), "gcp": ("TRUE", "FALSE"), "azure": ("Spot", "Regular")}
TYPES = {
    "aws": ("p5.48xlarge", "p5.48xlarge"),
    "gcp": ("projects/123/machineTypes/a2-ultragpu-8g", "a2-ultragpu-8g"),
    "azure": ("Standard_ND96isr_H100_v5", "Standard_ND96isr_H100_v5"),
}
#: No server listens there.
NOBODY = "http://127.0.0.1:9"
#: A second, and what a loaded machine adds to it.
AT_MOST_S = 3.0


def asked(base: str, asked_spot: bool = False) -> NodeFacts:
    """All clouds asked at one address, as AWS and Azure have the same."""
    return node_facts(asked_spot, {cloud: partial(asker, base) for cloud, asker in ASKERS.items()})


@pytest.mark.parametrize(("spot", "cloud"), diagonal([True, False], ASKERS))
def test_a_cloud_is_found_and_believed_against_what_was_asked_for(cloud: str, spot: bool) -> None:
    with metadata_server(cloud) as server:
        server.spot = SPOT[cloud][0 if spot else 1]
        server.type, server.node = TYPES[cloud][0], "node-7.zone.internal"
        before = time.time()
        facts = asked(server.url, asked_spot=not spot)
    assert before <= facts.started_at <= time.time()
    assert facts == NodeFacts(facts.started_at, "node-7.zone.internal", cloud, TYPES[cloud][1], spot, True)


@pytest.mark.parametrize("cloud", ASKERS)
def test_what_a_cloud_does_not_say_is_as_asked(cloud: str) -> None:
    with metadata_server(cloud) as server:
        server.type = TYPES[cloud][0]
        facts = asked(server.url, asked_spot=True)
    assert (facts.cloud, facts.instance_type) == (cloud, TYPES[cloud][1])
    assert facts.spot and not facts.spot_is_certain and facts.node == socket.gethostname()


@pytest.mark.parametrize("spot", [True, False])
def test_without_a_cloud_it_is_as_asked_and_nobody_is_waited_for(spot: bool) -> None:
    began = time.monotonic()
    facts = asked(NOBODY, asked_spot=spot)
    assert time.monotonic() - began < AT_MOST_S
    assert facts == NodeFacts(facts.started_at, socket.gethostname(), "", "", spot, False)


@pytest.mark.parametrize(("mood", "cloud"), diagonal(["garbage", "500", "hang"], ASKERS))
def test_a_server_that_misbehaves_is_no_cloud_and_costs_a_second(cloud: str, mood: str) -> None:
    with metadata_server(cloud) as server:
        server.spot, server.type, server.mood = SPOT[cloud][0], TYPES[cloud][0], mood
        began = time.monotonic()
        facts = asked(server.url)
        assert time.monotonic() - began < AT_MOST_S
    assert (facts.cloud, facts.instance_type, facts.spot, facts.spot_is_certain) == ("", "", False, False)


def test_what_was_said_before_a_server_hung_counts() -> None:
    hung = threading.Event()

    def hangs() -> Iterator[tuple[str, str]]:
        yield "spot", "yes"
        hung.wait(30)

    began = time.monotonic()
    facts = node_facts(False, {"aws": hangs})
    assert 0.9 < time.monotonic() - began < AT_MOST_S
    assert (facts.cloud, facts.spot, facts.spot_is_certain, facts.instance_type) == ("aws", True, True, "")
    hung.set()


def test_a_cloud_that_has_answered_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "WITHIN_S", 30.0)
    hung = threading.Event()

    def hangs() -> Iterator[tuple[str, str]]:
        hung.wait(30)
        yield "spot", "no"

    began = time.monotonic()
    assert node_facts(False, {"aws": hangs, "gcp": lambda: iter([("spot", "yes")])}).cloud == "gcp"
    assert time.monotonic() - began < 10
    hung.set()


@pytest.mark.parametrize(("model", "spot"), [("SPOT", True), ("STANDARD", False), ("", False)])
def test_google_may_say_it_by_the_provisioning_model(model: str, spot: bool) -> None:
    with metadata_server("gcp") as server:
        server.spot, server.model = "FALSE", model
        facts = asked(server.url)
    assert (facts.spot, facts.spot_is_certain) == (spot, True)


def test_a_stranger_at_googles_address_is_not_google() -> None:
    with metadata_server("gcp") as server:
        server.mood = "stranger"
        assert node_facts(False, {"gcp": partial(ask_gcp, server.url)}).cloud == ""


def test_names_that_are_none_are_not_believed() -> None:
    with metadata_server("aws") as server:
        server.spot, server.type, server.node = "spot", 'x"} 1\nslipstream_up 1', "n" * 300
        facts = asked(server.url)
    assert facts.spot and facts.instance_type == "" and facts.node == socket.gethostname()


def test_a_token_that_expired_is_renewed() -> None:
    with metadata_server("aws") as server:
        server.type = "p5.48xlarge"
        metadata = description.AwsMetadata(server.url)
        assert metadata.get("/latest/meta-data/instance-type") == b"p5.48xlarge"
        server.expire_tokens()
        assert metadata.get("/latest/meta-data/instance-type") == b"p5.48xlarge"
        assert metadata.get("/latest/meta-data/local-hostname") is None
        assert 401 in server.statuses


def test_the_node_of_a_scale_set_is_named_as_kubernetes_names_it() -> None:
    with metadata_server("azure") as server:
        server.node, server.computer = "aks-pool-vmss_7", "aks-pool-vmss000007"
        assert asked(server.url).node == "aks-pool-vmss000007"


def test_the_age_of_a_process_is_the_time_since_its_start() -> None:
    code = (
        "import time; begun = time.perf_counter(); from slipstream.shared.telemetry.node import process_age; "
        "time.sleep(0.3); print(time.perf_counter() - begun, process_age())"
    )
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    least, age = map(float, ended.stdout.split())
    assert least - 0.01 <= age <= time.perf_counter() - began + 0.01
