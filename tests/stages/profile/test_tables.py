"""Doublings and metrics are taken from the rows of the configured variant, and from no other."""

import numpy as np
import pytest
from factories import CONFIGURED, cost_rows

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


def test_one_batch_size_has_no_doubling() -> None:
    assert not len(tables.doubling_table(cost_rows((32,)), CONFIGURED))


def test_metrics_are_those_of_the_configured_variant_and_remat() -> None:
    metrics = tables.measure(cost_rows(), CONFIGURED)
    assert metrics["train_step_flops"] == metrics["predict_flops"] == 3200
    assert metrics["score_hlo_fusions"] == 4
    assert metrics["train_step_with_remat_temporary_bytes"] == 768
    assert "predict_with_remat_flops" not in metrics
    assert len(metrics) == 23
