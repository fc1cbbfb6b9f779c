"""The interval of a mean over members is Student's, within the range of the metric."""

import numpy as np
import pytest
import scipy.stats

from gradtrail.stages.model.members import over_members, spread


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_interval_of_a_mean_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(3.0, 0.5, count).tolist()
    result = spread("any", values)
    expected = scipy.stats.t.interval(0.95, count - 1, np.mean(values), scipy.stats.sem(values))
    assert (result.low, result.high) == pytest.approx(expected, rel=1e-12)
    assert result.value == np.mean(values)


def test_interval_ends_at_possible_values() -> None:
    means = over_members([{"accuracy": 0.99, "loss": 0.01}, {"accuracy": 0.95, "loss": 0.5}])
    assert (means["accuracy_high"], means["loss_low"]) == (1.0, 0.0)
    assert means["members"] == 2
