"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from slipstream.storage import retry, s3
from tests.support import processes, wording
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3
from tests.support.faulty_stores import REMOTE, Remote, azurite, connection_string, faulty_azure, faulty_google

processes.preload()

#: The directories whose files take minutes. They come first, so that in the end no process waits long for another.
LONGEST = ("command_line", "registration", "pods", "survival", "benchmarks", "train", "collectives", "export")
#: Tests of six seconds and more that say again, longer or elsewhere, what shorter ones do: `make prove` has them.
LONGER = (
    "collectives/test_cases.py::test_all_of_them_are_right_on_gloo[4]",
    "collectives/test_command_line.py::test_under_torchrun_it_is_one_table",
    "collectives/test_worker_group.py::test_the_rank_to_blame_is_named_in_time[hang-",
    "compress/test_distillation.py::test_killed_and_resumed_it_ends_the_same[False]",
    "distributed/test_names.py::test_torchs_sockets_ask_no_name_server[nullcontext()-in-addr]",
    "gpu_proof/test_command.py::test_a_check_holds_on_the_cpu[telemetry]",
    "pods/test_reading.py::test_a_pod_asks_for_the_blocks_that_it_reads[export]",
    "pods/test_training_deck.py::test_a_finished_training_has_a_deck",
    "promote/test_promotion.py::test_one_after_the_other[s3]",
    "train/fault_tolerance/test_kill_matrix.py::test_a_rank_that_stops_answering_is_given_up",
    "train/fault_tolerance/test_kill_matrix.py::test_batch_statistics_and_averaged_weights_resume_too[ema]",
    "train/fault_tolerance/test_nonfinite.py::"
    "test_it_goes_back_to_the_last_checkpoint_and_on_without_the_window[SIGKILL-step-12]",
    "train/fault_tolerance/test_notices.py::"
    "test_during_an_evaluation_all_leave_it_and_the_next_attempt_makes_it_again[3]",
    "train/fault_tolerance/test_s3.py::test_a_store_that_is_away_for_a_while_is_waited_for[3]",
    "train/fault_tolerance/test_topology.py::test_the_same_samples_in_the_same_order[48]",
    "train/fault_tolerance/test_twice.py::test_the_second_waits_for_the_first_and_takes_its_model",
    "train/parallel/test_layouts.py::test_a_layout_agrees_with_one_process[tensor 2]",
    "train/parallel/test_layouts.py::test_a_layout_agrees_with_one_process[weights 2 x tensor 2]",
    "train/telemetry/test_watched_training.py::test_a_kill_costs_little_of_what_was_sampled_and_no_cent",
    "train/telemetry/test_watched_training.py::test_a_prometheus_server_has_data_for_every_panel",
    "train/test_farewell.py::test_a_model_may_take_longer_to_write_than_a_collective_may",
    "compress/test_pruning.py::test_a_pruned_model_trains_on_is_pruned_again_and_exported",
    "gpu_proof/test_command.py::test_a_check_holds_on_the_cpu[kill and resume]",
    "pods/test_other_pods.py::test_a_benchmark_without_its_peers_is_given_up_for_good",
    "pods/test_other_pods.py::test_a_training_says_for_whom_it_waits_and_then_trains",
    "pods/test_out_of_memory.py::test_a_rank_of_a_job[0]",
    "pods/test_training_rehearsal.py::test_a_pod_that_disagrees_with_its_profile_refuses_to_start[2-",
    "prepare/test_bad_data.py::test_very_many_columns_and_very_long_texts",
    "promote/test_tokens.py::test_only_the_better_model_takes_the_others_place",
    "sweep/test_kills.py::test_two_workers_and_a_kill_of_each_kind",
    "train/fault_tolerance/test_notices.py::test_a_rank_whose_data_does_not_come_leaves_in_time",
    "train/fault_tolerance/test_outage.py::test_steps_go_on_and_end_with_the_same_weights[2-20-144]",
    "train/fault_tolerance/test_s3.py::test_a_run_survives_every_kind_of_bad_answer",
    "train/fault_tolerance/test_sequences.py::test_a_sequence[disk]",
    "train/parallel/test_no_waits.py::test_a_step_never_waits[2]",
    "train/telemetry/test_watched_training.py::"
    "test_whatever_the_driver_does_the_weights_are_the_same_and_the_agent_ends[a call that never returns]",
    "train/test_network_profile.py::test_training_applies_what_was_found_and_resumes_with_what_it_began_with",
    "train/memory/test_footprints.py::test_sharded_weights",
    "score/test_kills.py::test_three_kills",
    "sweep/test_worker.py::test_a_machine_that_is_taken_away_loses_nothing",
    "train/memory/test_command.py::test_what_does_not_fit_has_remedies_that_do",
    "train/parallel/test_checkpoints_across_layouts.py::test_a_checkpoint_changes_its_layout[1f1b 2-tensor 2]",
    "train/parallel/test_compiled.py::test_a_compiled_layout_agrees_with_one_process",
    "benchmarks/test_quick.py::test_the_quick_form_prints_and_writes_figures[compression]",
    "benchmarks/test_quick.py::test_the_quick_form_prints_and_writes_figures[goodput]",
    "benchmarks/test_quick.py::test_the_quick_form_prints_and_writes_figures[scoring]",
    "benchmarks/test_quick.py::test_the_quick_form_prints_and_writes_figures[startup]",
    "benchmarks/test_quick.py::test_the_quick_form_prints_and_writes_figures[storm]",
    "evaluate/test_language.py::test_150_steps_are_better_than_one_byte_of_context",
    "gpu_proof/test_command.py::test_a_check_holds_on_the_cpu[no waits]",
    "prepare/test_fuzz.py::test_any_lines_among_good_json",
    "prepare/test_fuzz.py::test_malformed_lines_among_good_ones",
    "sweep/test_forged_records.py::test_one_worker_among_all_of_them",
    "train/fault_tolerance/test_kill_matrix.py::test_damage_is_passed_over[mislead]",
    "train/fault_tolerance/test_nonfinite.py::"
    "test_a_model_with_a_parameter_that_had_no_gradient_is_resumed[with_unused]",
    "train/memory/test_command.py::test_a_configuration_of_text_says_it_before_the_text_is_prepared",
    "train/memory/test_running_out.py::test_it_goes_on_with_twice_as_many[DDP]",
    "train/memory/test_running_out.py::test_with_a_row_in_each_no_attempt_is_made_again[not traced]",
    "train/parallel/test_compiled.py::test_gradients_of_compiled_blocks_come_while_the_backward_pass_goes_on",
    "train/parallel/test_layouts.py::test_a_layout_agrees_in_fp32",
    "train/parallel/test_what_a_rank_reads.py::test_a_rank_brings_its_share[replicas 2-1f1b 2]",
    "train/test_adapted_training.py::test_what_is_kept_of_a_training_are_its_adapters[2-training1-nf4]",
    "train/test_network_profile.py::test_without_permission_numbers_stay_as_they_are",
)
#: The directory whose proofs compare times: nothing else may run at the same time.
TIMED = "collectives"


#: Variables that tell a process its place in a process group.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def directory_of(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wording.note(items, config)
    items.sort(key=lambda item: directory_of(item) not in LONGEST)
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(LONGER):
            item.add_marker(pytest.mark.prove)
        if directory_of(item) == TIMED and item.get_closest_marker("prove"):
            item.add_marker(pytest.mark.alone)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with wording.compared(item.path, item.nodeid.partition("::")[2]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield
    wording.end()


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """Raise an AssertionError if a test leaves other variables of a process group than it found."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    left = [name for name in RANK_VARIABLES if os.environ.get(name) != before[name]]
    for name in left:
        os.environ.pop(name, None)
    assert not left, f"variables of the environment that the test did not restore: {', '.join(left)}"


@pytest.fixture(scope="session")
def server() -> Iterator[FaultyS3]:
    with faulty_s3() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def google_server() -> Iterator[FaultyS3]:
    with faulty_google() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyS3]:
    if azurite() is None:
        pytest.skip("Azurite is not installed: npm install azurite")
    with faulty_azure(tmp_path_factory.mktemp("azurite")) as proxy:
        yield proxy


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are shortened, not removed."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def store(server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable S3 with the bucket ``bucket``."""
    quieten(server)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    s3.client_of.cache_clear()
    s3.client().create_bucket(Bucket="bucket")
    return quieten(server)


@pytest.fixture
def google(google_server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable Google Cloud Storage with the bucket ``bucket``."""
    from slipstream.storage import gcs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google_server.url)
    gcs.client_of.cache_clear()
    return quieten(google_server)


@pytest.fixture
def azure(azure_server: FaultyS3, short_pauses: None, monkeypatch: pytest.MonkeyPatch) -> FaultyS3:
    """A reachable Azure Blob Storage with the container ``bucket``."""
    quieten(azure_server)
    from slipstream.storage import azure

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(azure_server.url))
    azure.client_of.cache_clear()
    with contextlib.suppress(FileExistsError):
        azure.client("").mkdir("bucket")
    return quieten(azure_server)


@pytest.fixture(params=list(REMOTE))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    """A prefix of each store in turn."""
    fixture, write = REMOTE[request.param]
    return Remote(f"{request.param}://bucket/{tmp_path.name}/base", request.getfixturevalue(fixture), write)


def quieten(server: FaultyS3) -> FaultyS3:
    """Forget faults that an earlier test left, and what it asked."""
    server.plan.clear()
    server.fired.clear()
    server.requests.clear()
    server.silent_until = 0.0
    server.ignores_conditions, server.clock_ahead_s = False, 0.0
    return server
