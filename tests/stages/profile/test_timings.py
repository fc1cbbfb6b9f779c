"""What is logged follows from what was timed; and nothing is timed where nobody would see it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from factories import CONFIGURED, step_times, timings_of

from gradtrail.stages.profile import timings
from gradtrail.stages.profile.tables import doubling_table


def row(*, stored: object | None, debug_nans: bool = False, disable_jit: bool = False) -> Any:
    runtime = SimpleNamespace(debug_nans=debug_nans, disable_jit=disable_jit)
    return SimpleNamespace(stored=stored, stage=SimpleNamespace(runtime=runtime))


def test_nothing_is_timed_without_tracking_or_under_a_debug_switch() -> None:
    assert timings.wanted(row(stored=object()))
    assert not timings.wanted(row(stored=None))
    assert not timings.wanted(row(stored=object(), debug_nans=True))
    assert not timings.wanted(row(stored=object(), disable_jit=True))


def test_metrics_of_given_times() -> None:
    metrics = timings.metrics(timings_of(), CONFIGURED)
    assert metrics["jit/speedup"] == pytest.approx(100)
    assert metrics["jit/compile_seconds"] == 2.0
    assert metrics["jit/steps_until_it_pays"] == 21
    assert metrics["scan/speedup"] == pytest.approx(1.25)
    assert metrics["precision/bfloat16/examples_per_second"] == pytest.approx(32 / 0.042)
    assert metrics["batch/64/examples_per_second"] == pytest.approx(64 / 0.074)
    assert metrics["remat/on/seconds_per_step"] == metrics["remat/off/seconds_per_step"] == pytest.approx(0.042)
    assert metrics["remat/on/temporary_mib"] == 1.5
    groups = {"/".join(name.split("/")[:-1]) for name in metrics}
    assert groups == {
        *("jit", "scan", "remat/on", "remat/off", "batch/16", "batch/32", "batch/64"),
        *("precision/float32", "precision/bfloat16"),
    }


def test_what_never_pays_has_no_number_of_steps() -> None:
    timed = timings_of()
    never = timings.Timings(
        functions=timed.functions, times=timed.times, steps=step_times(without_jit=0.0005), rates=timed.rates
    )
    metrics = timings.metrics(never, CONFIGURED)
    assert "jit/steps_until_it_pays" not in metrics
    assert np.isfinite(list(metrics.values())).all()


def test_doublings_are_those_of_the_times() -> None:
    doubling = doubling_table(timings_of().functions, CONFIGURED, timings.DOUBLED)
    assert list(zip(doubling["batch_size"], doubling["doubled"], strict=True)) == [(16, 32), (32, 64)]
    assert doubling["seconds"].tolist() == pytest.approx([42 / 26, 74 / 42])
    assert doubling["examples_per_second"].tolist() == pytest.approx([2 * 26 / 42, 2 * 42 / 74])
