"""A bound that is broken is named in one line with what it allows."""

import math

import pytest

from gradtrail.core.common.validation import check


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (0, {"at_least": 0}),
        (1, {"at_most": 1}),
        (0.5, {"above": 0, "below": 1}),
        (7, {}),
        (1, {"at_least": 1, "at_most": 1}),
    ],
)
def test_values_within_bounds_pass(value: float, bounds: dict[str, float]) -> None:
    check("share", value, **bounds)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-1, {"at_least": 0}, "share must be at least 0, got -1"),
        (0, {"above": 0}, "share must be above 0, got 0"),
        (1.5, {"at_most": 1}, "share must be at most 1, got 1.5"),
        (1.0, {"at_least": 0, "below": 1}, "share must be at least 0 and below 1, got 1.0"),
        (math.nan, {"above": 0}, "share must be above 0, got nan"),
    ],
)
def test_values_beyond_a_bound_are_named(value: float, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        check("share", value, **bounds)
    assert str(caught.value) == message
