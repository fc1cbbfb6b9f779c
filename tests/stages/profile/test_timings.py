"""Metrics follow from the measured times; and nothing is timed without tracking or with a debug switch on."""

import dataclasses
from collections.abc import Sequence

import pytest
from factories import ROOT
from stage_results import CONFIGURED, timings_of

from gradtrail.core.profile.benchmark import FunctionTime
from gradtrail.core.profile.variants import Variant
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.profile import timings


def test_nothing_is_timed_without_tracking_or_under_a_debug_switch() -> None:
    runtime = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
    assert timings.is_timed(runtime, is_tracked=True)
    assert not timings.is_timed(runtime, is_tracked=False)
    for switch in ("debug_nans", "disable_jit"):
        assert not timings.is_timed(dataclasses.replace(runtime, **{switch: True}), is_tracked=True)


def test_metrics_of_given_times() -> None:
    metrics = timings.metrics(timings_of())
    assert metrics["jit/speedup"] == pytest.approx(100)
    assert metrics["jit/compile_seconds"] == 2.0
    assert metrics["jit/steps_until_it_pays"] == 21
    assert metrics["scan/speedup"] == pytest.approx(1.25)
    assert {name.partition("/")[0] for name in metrics} == {"jit", "scan"}


def time_of(variant: Variant, rounds: Sequence[float], function: str = "train_step") -> FunctionTime:
    rates = dict.fromkeys(("examples_per_second", "flops_per_second", "bytes_per_second", "arithmetic_intensity"), 1.0)
    return FunctionTime(function=function, variant=variant, rounds=tuple(rounds), seconds=1.0, **rates)


def test_precisions_are_compared_with_float32_at_the_configured_batch_size() -> None:
    half = dataclasses.replace(CONFIGURED, precision="bfloat16")
    for configured in (CONFIGURED, half):
        times = [
            time_of(half, [1.4] * 9),
            time_of(half, [50.0] * 9, "predict"),
            time_of(dataclasses.replace(CONFIGURED, batch_size=64), [70.0] * 9),
            time_of(CONFIGURED, [1.0] * 9),
            time_of(dataclasses.replace(CONFIGURED, remat=True), [90.0] * 9),
        ]
        ratios = timings.precision_ratios(times, configured)
        assert set(ratios) == {f"bfloat16_over_float32{end}" for end in ("", "_low", "_high")}
        assert list(ratios.values()) == pytest.approx([1.4] * 3)
