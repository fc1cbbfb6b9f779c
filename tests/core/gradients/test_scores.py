"""The summary on data made by hand; limits of the section `gradients`."""

import dataclasses

import numpy as np
import pytest
from factories import gradients_config

from gradtrail.core.gradients import scores


def test_summary_of_data_made_by_hand() -> None:
    norm = np.array([4.0, 1.0, 3.0, 2.0], np.float32)
    summary = scores.summarize(
        {
            "grad_norm": norm,
            "loss": norm**2,
            "margin": -norm,
            "input_norm": np.ones(4, np.float32),
            "el2n": np.array([4.0, 2.0, 3.0, 1.0], np.float32),
            "correct": np.array([False, True, True, True]),
        },
        top_fraction=0.5,
    )
    assert summary == pytest.approx(
        {
            "grad_norm_median": 2.5,
            "grad_norm_mean": 2.5,
            "grad_norm_max": 4.0,
            "rank_correlation_loss": 1.0,
            "rank_correlation_margin": -1.0,
            "rank_correlation_input_norm": 0.0,
            "rank_correlation_el2n": 0.8,
            "misclassified_among_largest": 0.5,
            "misclassified_overall": 0.25,
            "norm_held_by_largest": 0.7,
        }
    )


def test_the_largest_are_one_at_least_and_no_norm_at_all_is_no_fault() -> None:
    names = ("grad_norm", "loss", "margin", "input_norm", "el2n")
    nothing = {name: np.zeros(3, np.float32) for name in names} | {"correct": np.array([False, True, True])}
    summary = scores.summarize(nothing, top_fraction=0.01)
    assert summary["misclassified_among_largest"] == 1
    assert summary["norm_held_by_largest"] == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_fraction", 0.0),
        ("top_fraction", 1.1),
        ("num_largest", 0),
        ("num_suspects", 0),
        ("num_influenced", 0),
        ("bootstrap_samples", 99),
        ("curvature_iterations", -1),
        ("test_examples", (-1,)),
        ("test_examples: number of them", tuple(range(41))),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be "):
        dataclasses.replace(gradients_config(), **{key.partition(":")[0]: value})
