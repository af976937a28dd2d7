"""Network profiles of links of known rate, measured by the project's own launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

import torch

from harness.links import Links
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.measurements import measure_group
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.shared.interconnect.profile import NetworkProfile, merge_profiles


def profile_over(links: Links, config: CollectivesConfig, world: int = 0) -> NetworkProfile:
    """``config.launches`` launches between the ranks of ``links``, or the first ``world`` of them."""
    launches = [links.in_world(profile_of_this_launch, config, world=world)[0] for _ in range(config.launches)]
    return merge_profiles(launches)


def profile_of_this_launch(config: CollectivesConfig) -> NetworkProfile:
    with worker_context() as worker:
        return measure_group(worker, config)


@contextmanager
def worker_context() -> Iterator[WorkerContext]:
    """What a child of a launch works with, for a rank that a test has started."""
    heard, said = Pipe()
    with heard, said:
        yield WorkerContext(torch.device("cpu"), said)
