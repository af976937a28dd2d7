"""Time of a request on an instance: measured, predicted from a measurement, or unknown."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.operations.plan.estimate import LARGEST_BY_OPERATIONS
from slipstream.operations.plan.serving.hosts import serving_instances, serving_time, why_not
from slipstream.operations.plan.serving.model import cpu_peak_flops, read_model, service_times
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.shared.telemetry.prices import built_in_prices
from tests.support.exported_models import FP32, INT8, ON_CPU, report, variant, write_exported
from tests.support.measured_trainings import figures
from tests.support.wording import same_wording


def test_a_prediction_is_the_ratio_of_what_cores_compute(tmp_path: Path) -> None:
    read, prices = read_model(write_exported(tmp_path / "one", training=ON_CPU)), built_in_prices()
    (there,) = serving_instances(prices, 1, ["c3d-highcpu-4"])
    for name in (FP32, INT8):
        here = service_times(variant(read.report, name).latency_ms["1"])
        time = serving_time(read, variant(read.report, name), there)
        assert here and not isinstance(time, str) and time.error == LARGEST_BY_OPERATIONS
        assert time.service.mean == pytest.approx(here.mean * cpu_peak_flops()["8481C"] / cpu_peak_flops()["9B14"])
        assert time.at_worst.mean == pytest.approx(1.85 * time.service.mean)
    assert there.holds == 2 and serving_instances(prices, 2, ["c3d-highcpu-4"])[0].holds == 1


def test_a_gpu_is_predicted_by_operations_and_takes_a_launch_at_least(tmp_path: Path) -> None:
    slow = figures(gpu="", speed={"flops_per_row": 3e9, "peak_flops": 100e9}, world=ON_CPU.world)
    read = read_model(write_exported(tmp_path / "slow", report(cpu="Unknown CPU"), slow))
    fp32 = variant(read.report, FP32)
    (gpu,) = serving_instances(built_in_prices(), 1, ["g6.xlarge"])
    time = serving_time(read, fp32, gpu)
    assert not isinstance(time, str)
    same_wording(time.how)
    assert time.service.median == pytest.approx(1e-3)
    # In batches of 256 the operations count: 100e9 a second here, 30.3e12 there.
    batch, rate = max(fp32.rows_per_second.items(), key=lambda each: each[1])
    assert batch == "256" and time.rows_per_second == pytest.approx(min(rate * 303, 256 / 1e-3))
    assert isinstance(serving_time(read, variant(read.report, INT8), gpu), str)


def test_a_model_measured_on_a_gpu_is_predicted_on_others_by_both_limits(tmp_path: Path) -> None:
    read = read_model(write_exported(tmp_path / "gpu", report(gpu="NVIDIA L4"), ON_CPU))
    l4, h100, cpu = serving_instances(built_in_prices(), 1, ["g6.xlarge", "p5.48xlarge", "c3-highcpu-4"])
    fp32 = variant(read.report, FP32)
    times = [serving_time(read, fp32, place) for place in (l4, h100, cpu)]
    assert not isinstance(times[0], str) and times[0].how == "measured"
    # A row's million operations are negligible compared with reading the weights, which are counted once.
    assert not isinstance(times[1], str)
    assert times[1].service.mean == pytest.approx(times[0].service.mean * 300 / 3350, rel=0.01)
    same_wording(str(times[2]))


def test_the_training_says_what_the_exports_cpu_computes(tmp_path: Path) -> None:
    six = replace(ON_CPU, world=replace(ON_CPU.world, size=2, threads=3))
    unknown = read_model(write_exported(tmp_path / "unknown", report(cpu="Unknown CPU"), six))
    assert unknown.core_peak == 172.8e9 / 6 and unknown.flops == 1e6
    on_a_gpu = read_model(write_exported(tmp_path / "gpu", report(cpu="Unknown CPU"), figures()))
    assert on_a_gpu.core_peak is None


def test_quantised_variants_are_not_predicted_from_a_cpu_that_sums_otherwise(tmp_path: Path) -> None:
    read = read_model(write_exported(tmp_path / "old", report(flags=["avx2"]), ON_CPU))
    (there,) = serving_instances(built_in_prices(), 1, ["c3d-highcpu-4"])
    same_wording(str(serving_time(read, variant(read.report, INT8), there)))
    assert not isinstance(serving_time(read, variant(read.report, FP32), there), str)


def test_percentiles_make_a_distribution() -> None:
    figures_ = variant(report(), FP32).latency_ms["1"]
    assert figures_.p50 and figures_.p90 and figures_.p99 and figures_.mean is None
    service = service_times(figures_)
    assert service and (service.median, service.p99) == pytest.approx((0.12e-3, 0.24e-3))
    assert service.quantile(0.9) == pytest.approx(0.168e-3) and 0.12e-3 < service.mean < 0.168e-3
    recorded = service_times(replace(figures_, mean=0.2, variation=0.5))
    assert recorded == ServiceTimes(service.times, service.shares, 0.2e-3, 0.25)
    few = service_times(replace(figures_, p99=None))
    assert few and few.p99 == pytest.approx(0.12e-3 * 1.4 ** (2.3263 / 1.2816))
    assert service_times(replace(figures_, p90=None)) is None and service_times(None) is None
    assert service_times(replace(figures_, p90=figures_.p50, p99=figures_.p50))


def test_an_instance_of_too_few_cores_or_an_unknown_cpu_is_not_planned_and_said(tmp_path: Path) -> None:
    read = read_model(write_exported(tmp_path / "wide", report(threads=4), ON_CPU))
    fp32, prices = variant(read.report, FP32), built_in_prices()
    small, enough = serving_instances(prices, 4, ["c3-highcpu-4", "c3-highcpu-8"])
    same_wording(str(serving_time(read, fp32, small)))
    assert not isinstance(serving_time(read, fp32, enough), str)
    other = replace(enough, cpu="Z80")
    same_wording(str(serving_time(read, fp32, other)))
    assert list(why_not(read, [fp32], [small, other])) == [
        "onnx-fp32: not planned on 8481C: has fewer cores than a call has threads, 4",
        "onnx-fp32: not planned on Z80: its CPU Z80 is unknown",
    ]
