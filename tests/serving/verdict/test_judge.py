"""Which limits a number keeps, and what is said of one that is not known."""

import dataclasses
import math

import pytest
from factories import ROOT
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.serving.slo import Limits, read_slo
from gradtrail.serving.verdict.judge import KINDS, Judgement, Measured, judge

LIMITS = read_slo(ROOT / "deploy/slo.yaml").limits


def number(value: float, low: float | None = None, high: float | None = None) -> Measured:
    return Measured(value=value, low=value if low is None else low, high=value if high is None else high, how="")


def good() -> dict[str, Measured]:
    """Numbers that keep every limit, by a fifth."""
    factor = {"at least": 1.02, "at most": 0.8}
    return {name: number(factor[kind.side] * getattr(LIMITS, name)) for name, kind in KINDS.items()}


def outcomes(judgement: Judgement) -> dict[str, str]:
    return {line.name: line.outcome for line in judgement.lines}


def test_every_limit_is_of_a_kind():
    assert KINDS.keys() == {field.name for field in dataclasses.fields(Limits)}
    assert judge(LIMITS, good(), {}).outcome == "pass"


@pytest.mark.parametrize("name", KINDS)
def test_one_number_past_its_limit_fails_that_limit_alone(name: str):
    past = {"at least": 0.9, "at most": 1.1}[KINDS[name].side] * getattr(LIMITS, name)
    judgement = judge(LIMITS, good() | {name: number(past)}, {})
    assert judgement.outcome == "fail"
    assert [line.name for line in judgement.failed] == [name]
    assert outcomes(judgement)[name] == "fail"


@given(
    value=st.floats(0.1, 10),
    below=st.floats(0, 5),
    above=st.floats(0, 5),
    side=st.sampled_from(["p50_ms_1", "agreement"]),
)
def test_the_worse_end_decides_and_an_interval_across_the_limit_is_inconclusive(
    value: float, below: float, above: float, side: str
):
    limits = dataclasses.replace(LIMITS, p50_ms_1=2.0, agreement=0.96)
    limit = getattr(limits, side)
    found = number(value, value - below, value + above)
    (line,) = (each for each in judge(limits, {side: found}, {}).lines if each.name == side)
    is_least = KINDS[side].side == "at least"
    ends = [end >= limit if is_least else end <= limit for end in (found.low, found.high)]
    assert line.is_kept == all(ends)
    assert ("inconclusive" in line.outcome) == (ends.count(True) == 1)
    assert (line.margin >= 0) == line.is_kept


def test_an_end_that_is_not_known_fails_as_inconclusive():
    judgement = judge(LIMITS, good() | {"p99_ms_1": number(1.0, -math.inf, math.inf)}, {})
    assert outcomes(judgement)["p99_ms_1"] == "fail: inconclusive"


def test_a_limit_without_a_number_fails_unless_it_is_excused_or_null():
    found = {name: value for name, value in good().items() if name not in ("agreement", "memory_mib", "p99_ms_1")}
    missing = {"agreement": "not judged: there is no champion", "memory_mib": "no idea"}
    judgement = judge(dataclasses.replace(LIMITS, p99_ms_1=None), found, missing)
    said = outcomes(judgement)
    assert said["agreement"] == "not judged: there is no champion"
    assert said["memory_mib"] == "fail: not known, no idea"
    assert [line.name for line in judgement.failed] == ["memory_mib"]


def test_nan_keeps_no_limit():
    assert judge(LIMITS, good() | {"accuracy_lower_bound": number(math.nan)}, {}).outcome == "fail"
