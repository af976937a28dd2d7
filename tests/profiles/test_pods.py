"""The manifest of a pod for a placement with every field."""

import json
import os
import subprocess
import sys

import pytest
from kubernetes.client import ApiClient

from slipstream.flyte.metadata import needs_template, pod_accelerator, pod_environment, pod_metadata, pod_template
from slipstream.shared.profiles.placement import Placement, Toleration
from slipstream.shared.profiles.profile import Profile

AFFINITY = {
    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
}

EVERYTHING = Placement(
    nodes=2,
    processes=8,
    cpu="90",
    memory="1000Gi",
    gpu="8",
    efa=4,
    rdma={"rdma/hca": "1"},
    hugepages="5120Mi",
    groups=[44, 110],
    tolerations=[Toleration(key="nvidia.com/gpu", effect="NoSchedule")],
    node_selector={"pool": "gpu"},
    affinity=AFFINITY,
    scheduler="volcano",
    priority="nightly",
    labels={"kueue.x-k8s.io/queue-name": "gpus"},
    annotations={"karpenter.sh/do-not-disrupt": "true"},
    grace_seconds=120,
    termination_message_policy="File",
    data_cache_gib=30.5,
)


def test_everything_is_in_the_manifest() -> None:
    template = pod_template(EVERYTHING)
    assert (template.labels, template.annotations) == (EVERYTHING.labels, EVERYTHING.annotations)
    resources = {
        "cpu": "90",
        "memory": "1000Gi",
        "ephemeral-storage": "51Gi",
        "nvidia.com/gpu": "8",
        "vpc.amazonaws.com/efa": "4",
        "hugepages-2Mi": "5120Mi",
        "rdma/hca": "1",
    }
    assert ApiClient().sanitize_for_serialization(template.pod_spec) == {
        "containers": [
            {
                "name": "primary",
                "resources": {"limits": resources, "requests": resources},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "terminationMessagePolicy": "File",
            }
        ],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"pool": "gpu"},
        "affinity": AFFINITY,
        "schedulerName": "volcano",
        "priorityClassName": "nightly",
        "securityContext": {"supplementalGroups": [44, 110]},
        "terminationGracePeriodSeconds": 120,
    }


@pytest.mark.parametrize(
    ("place", "resource"),
    [
        (Placement(gpu="1"), "nvidia.com/gpu"),
        (Placement(gpu="1", gpu_resource="amd.com/gpu"), "amd.com/gpu"),
        (Placement(gpu="1", mig="3g.20gb"), "nvidia.com/mig-3g.20gb"),
        (Placement(gpu="1", mig="3g.20gb", mig_strategy="single"), "nvidia.com/gpu"),
        (Placement(gpu="1", shared_gpu="mps"), "nvidia.com/gpu.shared"),
        (Placement(gpu="1", shared_gpu="mps", gpu_resource="nvidia.com/gpu"), "nvidia.com/gpu"),
        (Placement(gpu="1", mig="1g.5gb", shared_gpu="time-slicing"), "nvidia.com/mig-1g.5gb.shared"),
    ],
)
def test_what_a_gpu_is_called(place: Placement, resource: str) -> None:
    assert place.resources[resource] == "1"
    # Flyte itself only knows the first name.
    assert needs_template(place) == (resource != "nvidia.com/gpu")


def test_a_partition_by_the_single_strategy_is_the_accelerators() -> None:
    place = Placement(gpu="1", accelerator="nvidia-tesla-a100", mig="1g.5gb", mig_strategy="single")
    asked = pod_accelerator(place).to_flyte_idl()
    assert (asked.device, asked.partition_size) == ("nvidia-tesla-a100", "1g.5gb")
    whole = pod_accelerator(Placement(gpu="1", accelerator="nvidia-l4")).to_flyte_idl()
    assert (whole.device, whole.partition_size) == ("nvidia-l4", "")


def test_a_task_with_a_template_names_no_resources_beside_it() -> None:
    """Flytekit would replace all of the template's by those."""
    assert set(pod_metadata(EVERYTHING)) == {"pod_template"}
    assert set(pod_metadata(Placement())) == {"requests", "limits"}


LIBRARIES = """
import json
import numpy, pyarrow, torch
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from threadpoolctl import threadpool_info
from slipstream.shared.machine.limits import usable_cores

pools = {f"{pool['internal_api']} {pool['filepath']}": pool["num_threads"] for pool in threadpool_info()}
torch_threads, sklearn_threads = torch.get_num_threads(), _openmp_effective_n_threads()
print(json.dumps({"arrow": pyarrow.cpu_count(), "torch": torch_threads, "sklearn": sklearn_threads,
                  "ours": usable_cores(), **pools}))
"""


@pytest.mark.prove
def test_every_library_starts_as_many_threads_as_the_pod_has_cpus() -> None:
    place = Placement(cpu="1")
    variables = {**os.environ, **pod_environment(Profile("mine", place, {}), place, "train")}
    printed = subprocess.run(
        [sys.executable, "-c", LIBRARIES], env=variables, check=True, capture_output=True, text=True
    )
    threads = json.loads(printed.stdout)
    assert len(threads) > 4 and set(threads.values()) == {1}, threads


def test_a_profiles_own_environment_wins() -> None:
    place = Placement(cpu="8", environment={"OMP_NUM_THREADS": "2"})
    assert pod_environment(Profile("mine", place, {}), place, "train")["OMP_NUM_THREADS"] == "2"
