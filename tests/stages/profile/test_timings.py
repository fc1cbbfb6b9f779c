"""Tables and metrics of a profile follow from the measured times and costs of the configured variant."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from factories import ROOT
from stage_results import CONFIGURED, cost_rows, timings_of

from gradtrail.core.profile.benchmark import FunctionTime
from gradtrail.core.profile.variants import Variant
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.profile import tables, timings


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


def test_doublings_by_the_rows_themselves() -> None:
    costs = cost_rows((64, 16, 32, 48))
    doubling = tables.doubling_table(costs, CONFIGURED)
    assert list(zip(doubling["function"], doubling["batch_size"], doubling["doubled"], strict=True)) == [
        ("train_step", 16, 32),
        ("train_step", 32, 64),
    ]
    assert doubling["flops"].tolist() == [2, 2]
    assert doubling["touched_bytes"].tolist() == pytest.approx([400 / 240, 720 / 400], abs=1e-6)
    assert doubling["total_bytes"].tolist() == pytest.approx([2024 / 1256, 5096 / 2024], abs=1e-6)
    np.testing.assert_allclose(doubling["temporary_bytes"], [np.nan, 3840 / 768])


def test_metrics_are_the_main_costs_of_the_configured_variant() -> None:
    metrics = tables.measure(cost_rows(), CONFIGURED)
    assert set(metrics) == {"train_step_flops", "train_step_total_bytes", "predict_flops"}
    assert metrics["train_step_flops"] == metrics["predict_flops"] == 3200


def test_times_are_written_as_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(path.name))
    timings.write(tmp_path, timings_of(), CONFIGURED, "a title")
    stems = ("jit", "batch_sizes", "precision_and_remat", "roofline", "where_the_time_goes")
    assert drawn == [f"{stem}.png" for stem in stems]
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {"functions", "doubling", "where_the_time_goes", "steps"}
