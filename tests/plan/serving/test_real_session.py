"""Poisson arrivals at a real session of ONNX Runtime: measured p99 against the plan from its measured calls.

Time is that of the thread: it passes while the server waits for an arrival, which it does by asking for the time, and
stands still while other processes have the core.
"""

from collections.abc import Callable
from time import thread_time, thread_time_ns

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slipstream.operations.plan.estimate import MEASURED
from slipstream.operations.plan.serving.hosts import ServingTime
from slipstream.operations.plan.serving.model import service_times
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.comparison.latencies import TURN_CALLS, latency_figures
from tests.support.recorded_loads import steady_p99

WIDTH, LAYERS, ROWS = 256, 8, 32
CALLS, ARRIVALS, RUNS = 3_000, 8_000, 10

Call = Callable[[], object]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """A call of a perceptron, of about 0.2 ms."""
    random, nodes, weights, name = np.random.default_rng(0), [], [], "x"
    for layer in range(LAYERS):
        values = random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
        weights.append(numpy_helper.from_array(values, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [name := f"r{layer}"]))
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", WIDTH]) for end in ("x", name)]
    graph = helper.make_graph(nodes, "perceptron", ends[:1], ends[1:], weights)
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    run, rows = onnx_predictor(path, threads=1), random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return lambda: run([rows])


def measured(call: Call) -> ServingTime:
    """What a plan knows of the calls: what the export would have recorded of them, in turns as it takes them."""
    taken: list[int] = []
    while len(taken) < CALLS:
        call()
        for _ in range(TURN_CALLS):
            started = thread_time_ns()
            call()
            taken.append(thread_time_ns() - started)
    service = service_times(latency_figures(np.array(taken), None))
    assert service
    return ServingTime(service, 1.0, MEASURED, 0.0)


def observed_p99(call: Call, gaps: np.ndarray) -> float:
    """Of one server, to which requests come whether or not it is free."""
    began, taken = thread_time(), []
    for due in (began + np.cumsum(gaps)).tolist():
        while thread_time() < due:
            pass
        call()
        taken.append(thread_time() - due)
    return float(np.quantile(taken, 0.99))


@pytest.mark.prove
@pytest.mark.alone
@pytest.mark.parametrize("busy", [0.5, 0.7, 0.85])
def test_the_planned_p99_is_not_too_short_in_8_of_10_runs(call: Call, busy: float) -> None:
    random, ratios = np.random.default_rng(0), []
    for _ in range(RUNS):
        time = measured(call)
        rate = busy / time.service.mean
        found = observed_p99(call, random.exponential(1 / rate, ARRIVALS))
        ratios.append(steady_p99(rate, time.planned, 1) / found)
    print(f"{busy:.0%} busy: planned over observed p99:", *(f"{ratio:.2f}" for ratio in sorted(ratios)))
    assert sum(ratio >= 1 for ratio in ratios) >= 8, ratios
    assert np.median(ratios) < 2, "a plan that is always too careful shows nothing"
