"""The packaged main workflow on a rehearsed cluster: cached stages hit, and kills do not change the model."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from flyteidl.core.literals_pb2 import Literal

from slipstream.config import RunConfig
from slipstream.operations.proofs.rehearsal.acts import Acts
from slipstream.operations.proofs.rehearsal.bucket import SECRET
from slipstream.operations.proofs.rehearsal.propeller import Execution, NodeFailed
from slipstream.operations.proofs.rehearsal.rehearsal import (
    CONFIG,
    TARGET,
    Rehearsal,
    literal,
    rehearsal,
    shrunk,
    write_table,
)
from slipstream.operations.proofs.rehearsal.rendering import SPOT_TOLERATION
from slipstream.shared.profiles.profile import load_profile
from slipstream.shared.settings import portable

MAIN, PREPARE = "workflows.training.train_and_export", "workflows.training.prepare"
#: The pods of a main job: those whose results are found again, and those of every run.
CACHED = {"prepare", "train", "evaluate", "export"}
ALWAYS = {"resolve_inputs", "benchmark_collectives", "report"}


def pods_of(execution: Execution) -> list[str]:
    """The tasks of all pods of an execution."""
    return [attempt.task for attempt in execution.record.attempts for _ in attempt.pods]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path_factory.mktemp("local"), shrunk(load_profile("local"))) as place:
        yield place


@pytest.fixture(scope="module")
def spot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path_factory.mktemp("spot"), shrunk(load_profile("a100-spot"))) as place:
        yield place


def inputs_of(place: Rehearsal) -> dict[str, Literal]:
    return {"data": literal(write_table(place.bucket)), "target": literal(TARGET), "config": literal(CONFIG)}


@pytest.mark.prove
def test_prepared_data_is_found_again(local: Rehearsal) -> None:
    inputs = inputs_of(local)
    first, second = (local.execution(f"prepare-{seed}", seed=seed) for seed in (1, 2))
    first.run(PREPARE, inputs)
    assert first.record.cached and not first.record.hits
    second.run(PREPARE, inputs)
    assert second.record.hits == second.record.cached == first.record.cached
    assert {attempt.task for attempt in second.record.attempts} == {"list_data", "report_data"}


def prepared_in(place: Rehearsal) -> set[str]:
    keys = place.bucket.keys("raw/")
    return {key.rpartition("/")[0] for key in keys if "/tasks.prepare.prepare/manifest" in key}


@pytest.mark.prove
def test_a_cached_output_whose_bytes_are_gone_is_named_and_made_again(local: Rehearsal) -> None:
    """As a lifecycle rule leaves it: Flyte's cache goes on naming the output."""
    local.forget()
    inputs = inputs_of(local)
    before = prepared_in(local)
    local.execution("made").run(PREPARE, inputs)
    (made,) = prepared_in(local) - before
    for key in local.bucket.keys(made):
        local.bucket.s3.delete_object(Bucket=local.bucket.name, Key=key)
    again = local.execution("gone")
    with pytest.raises(NodeFailed) as failure:
        again.run(PREPARE, inputs)
    assert set(again.record.hits.values()) == {"prepare"}
    line = f"{local.bucket.uri(made)}: this cached output of the task tasks.prepare.prepare was deleted from the store"
    said = str(failure.value)
    assert f"{line}, but " in said and "start again with --overwrite-cache, which makes it again" in said
    assert not failure.value.outcome.recoverable
    overwritten = local.execution("overwritten", overwrite_cache=True)
    overwritten.run(PREPARE, inputs)
    assert "prepare" in pods_of(overwritten)
    last = local.execution("last")
    last.run(PREPARE, inputs)
    assert set(last.record.hits.values()) == {"prepare"}


@pytest.mark.prove
def test_a_users_mistake_ends_the_execution_at_once(local: Rehearsal) -> None:
    execution = local.execution("mistake")
    with pytest.raises(NodeFailed, match="absent") as failure:
        execution.run(PREPARE, {**inputs_of(local), "target": literal("absent")})
    assert not failure.value.outcome.recoverable and failure.value.outcome.payer == "user"
    assert all(not pod.running for pod in execution.pods)
    stored = [local.bucket.read(key) for key in local.bucket.keys("")]
    written = [path.read_bytes() for path in local.workdir.rglob("*") if path.is_file()]
    assert stored and written and not [1 for content in (*stored, *written) if SECRET.encode() in content]


@pytest.mark.prove
def test_every_cached_node_hits_the_second_time_and_the_rest_are_three_pods(local: Rehearsal) -> None:
    local.forget()
    acts = Acts(local, inputs_of(local), print)
    first = acts.undisturbed()
    assert sorted(pods_of(first)) == sorted([*CACHED, *ALWAYS])
    again = acts.again()
    assert set(again.record.hits.values()) == CACHED
    assert sorted(pods_of(again)) == sorted(ALWAYS)
    # The hardware is known where the benchmark runs, so that needs its pod; the profile is the first run's.
    ran = [
        pod.said()
        for attempt in again.record.attempts
        if attempt.task == "benchmark_collectives"
        for pod in attempt.pods
    ]
    assert len(ran) == 1 and "is reused" in ran[0]


@pytest.mark.prove
def test_a_changed_export_setting_repeats_only_the_export(local: Rehearsal) -> None:
    inputs = inputs_of(local)
    local.execution("unchanged", seed=3).run(MAIN, inputs)
    other = replace(CONFIG, export=replace(CONFIG.export, calibration_rows=CONFIG.export.calibration_rows + 1))
    changed = local.execution("changed", seed=3)
    changed.run(MAIN, {**inputs, "config": literal(other)})
    assert set(changed.record.hits.values()) == CACHED - {"export"}
    assert sorted(pods_of(changed)) == sorted([*ALWAYS, "export"])


def as_the_console_sends(config: RunConfig) -> Literal:
    """A literal of the configuration as a relaunch from the console sends it: a Struct, whose numbers are floats."""
    made = Literal()
    made.scalar.generic.update(portable(config))
    return made


@pytest.mark.prove
def test_a_relaunch_from_the_console_hits_the_cache(local: Rehearsal) -> None:
    inputs = inputs_of(local)
    local.execution("started", seed=4).run(MAIN, inputs)
    relaunched = local.execution("relaunched", seed=4)
    sent = as_the_console_sends(CONFIG)
    assert isinstance(sent.scalar.generic["training"]["epochs"], float)
    relaunched.run(MAIN, {**inputs, "config": sent})
    assert set(relaunched.record.hits.values()) == CACHED
    assert sorted(pods_of(relaunched)) == sorted(ALWAYS)


@pytest.mark.prove
def test_kills_change_nothing_in_the_model(spot: Rehearsal) -> None:
    acts = Acts(spot, inputs_of(spot), print)
    undisturbed = acts.undisturbed()
    tasks = {attempt.task for attempt in undisturbed.record.attempts}
    assert {"parse_share", "scan_share", "fit_shares", "encode_share", "merge_partition"} < tasks
    acts.again()
    disturbed = acts.disturbed(seed=0, number=8)
    assert disturbed.record.spent["user"] and disturbed.record.spent["system"]


@pytest.mark.prove
def test_a_run_on_demand_has_the_weights_of_one_on_spot(spot: Rehearsal) -> None:
    """``--interruptible`` reaches every pod, both ways, and no number depends on it."""
    inputs, weights = inputs_of(spot), []
    for chosen in (True, False):
        spot.forget()
        before = set(spot.bucket.keys("raw/"))
        execution = spot.execution(f"on-{'spot' if chosen else 'demand'}", seed=5, interruptible=chosen)
        execution.run(MAIN, inputs)
        assert len(execution.pods) > len(CACHED)
        assert {SPOT_TOLERATION in pod.tolerations for pod in execution.pods} == {chosen}
        made = set(spot.bucket.keys("raw/")) - before
        (best,) = [key for key in made if key.endswith("tasks.train.train/best.safetensors")]
        weights.append(spot.bucket.read(best))
    assert weights[0] == weights[1]
