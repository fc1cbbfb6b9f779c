"""Doublings and metrics are taken from the rows of the configured variant, and from no other."""

import numpy as np
import pytest
from stage_results import CONFIGURED, cost_rows

from gradtrail.stages.profile import tables


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
