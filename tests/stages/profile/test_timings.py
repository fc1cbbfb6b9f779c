"""Tables and metrics of a profile follow from the measured times and costs of the configured variant."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from factories import ROOT
from stage_results import CONFIGURED, cost_rows, timings_of

from gradtrail.core.profile.benchmark import FunctionTime, Variant
from gradtrail.stages.common import plotting
from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.params import load_section
from gradtrail.stages.profile import timings


def test_nothing_is_timed_without_tracking_or_under_a_debug_switch() -> None:
    runtime = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
    assert timings.is_timed(runtime, is_tracked=True)
    assert not timings.is_timed(runtime, is_tracked=False)
    assert not timings.is_timed(dataclasses.replace(runtime, disable_jit=True), is_tracked=True)


def time_of(variant: Variant, rounds: Sequence[float], function: str = "train_step") -> FunctionTime:
    return FunctionTime(function=function, variant=variant, rounds=tuple(rounds))


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


def test_metrics_are_the_main_costs_of_the_configured_variant() -> None:
    metrics = timings.measure(cost_rows(), CONFIGURED)
    assert set(metrics) == {"train_step_flops", "train_step_total_bytes", "predict_flops"}
    assert metrics["train_step_flops"] == metrics["predict_flops"] == 3200


def test_times_are_written_as_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(path.name))
    timings.write(tmp_path, timings_of(), CONFIGURED, "a title")
    stems = ("times", "roofline")
    assert drawn == [f"{stem}.png" for stem in stems]
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {"functions"}
