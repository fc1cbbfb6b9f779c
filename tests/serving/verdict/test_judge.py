"""The limits of `deploy/slo.yaml`: which are valid, which a number passes, and the outcome if it is not known."""

import dataclasses
import math
from pathlib import Path

import pytest
from factories import ROOT
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.serving.slo import Limits, read_slo
from gradtrail.serving.verdict.judge import KINDS, Judgement, Measured, judge
from gradtrail.serving.verdict.table import as_texts
from gradtrail.support.errors import UserError

LIMITS = read_slo(ROOT / "deploy/slo.yaml").limits


def number(value: float, low: float | None = None, high: float | None = None) -> Measured:
    return Measured(value=value, low=value if low is None else low, high=value if high is None else high, how="")


def good() -> dict[str, Measured]:
    """Numbers that pass every limit."""
    factor = {"at least": 1.02, "at most": 0.8}
    return {name: number(factor[kind.side] * getattr(LIMITS, name)) for name, kind in KINDS.items()}


def outcomes(judgement: Judgement) -> dict[str, str]:
    return {line.name: line.outcome for line in judgement.lines}


def test_every_limit_has_a_kind_and_a_number_past_it_fails_only_that_limit():
    assert KINDS.keys() == {field.name for field in dataclasses.fields(Limits)}
    assert judge(LIMITS, good(), {}).outcome == "pass"
    for name, kind in KINDS.items():
        past = {"at least": 0.9, "at most": 1.1}[kind.side] * getattr(LIMITS, name)
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
def test_worse_end_decides_and_interval_across_the_limit_is_inconclusive(
    value: float, below: float, above: float, side: str
):
    limits = dataclasses.replace(LIMITS, p50_ms_1=2.0, agreement=0.96)
    limit = getattr(limits, side)
    measured = number(value, value - below, value + above)
    (line,) = (line for line in judge(limits, {side: measured}, {}).lines if line.name == side)
    is_least = KINDS[side].side == "at least"
    ends = [end >= limit if is_least else end <= limit for end in (measured.low, measured.high)]
    assert line.passes == all(ends)
    assert ("inconclusive" in line.outcome) == (ends.count(True) == 1)
    assert (line.margin >= 0) == line.passes


def test_infinite_end_and_nan_fail():
    judgement = judge(LIMITS, good() | {"p99_ms_1": number(1.0, -math.inf, math.inf)}, {})
    assert outcomes(judgement)["p99_ms_1"] == "fail: inconclusive"
    (row,) = (line.as_json() for line in judgement.lines if line.name == "p99_ms_1")
    assert (row["low"], row["high"], row["margin"], row["pass"]) == (None, None, None, False)
    assert [*as_texts(row).values()][2:5] == ["−∞ to ∞", "at most 10.0 ms", "unknown"]
    assert judge(LIMITS, good() | {"accuracy_lower_bound": number(math.nan)}, {}).outcome == "fail"


def test_missing_number_fails_unless_it_is_excused_or_its_limit_is_null():
    numbers = {name: value for name, value in good().items() if name not in ("agreement", "memory_mib", "p99_ms_1")}
    missing = {"agreement": "not judged: there is no champion", "memory_mib": "no idea"}
    judgement = judge(dataclasses.replace(LIMITS, p99_ms_1=None), numbers, missing)
    assert outcomes(judgement)["agreement"] == "not judged: there is no champion"
    assert outcomes(judgement)["memory_mib"] == "fail: not known, no idea"
    assert [line.name for line in judgement.failed] == ["memory_mib"]
    rows = {line.name: as_texts(line.as_json()) for line in judgement.lines}
    assert [*rows["memory_mib"].values()][1:5] == ["–", "–", "at most 768 MiB", "–"]
    assert rows["p99_ms_1"]["must be"] == "–"


TEXT = (ROOT / "deploy/slo.yaml").read_text()


def test_committed_file_judges_every_limit_and_null_is_allowed(tmp_path: Path):
    limits = read_slo(ROOT / "deploy/slo.yaml").limits
    assert None not in vars(limits).values()
    null = written(tmp_path, TEXT.replace("  agreement: 0.96", "  agreement: null"))
    assert read_slo(null).limits.agreement is None
    with pytest.raises(UserError, match=r"limits.agreement is missing"):
        read_slo(written(tmp_path, TEXT.replace("  agreement: 0.96\n", "")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("agreement: 0.96", "agreement: 1.5", "limits.agreement must be at least 0 and at most 1, got 1.5"),
        ("p99_ms_1: 10.0", "p99_ms_1: 0", "limits.p99_ms_1 must be above 0"),
        ("p99_ms_1: 10.0", "p98_ms_1: 10.0", "limits.p98_ms_1 is not a known key; did you mean 'p99_ms_1'?"),
        ("p99_ms_1: 10.0", "p99_ms_1: fast", "limits.p99_ms_1: Input should be a valid number, got 'fast'"),
        ("significance: 0.01", "significance: 0", "canary.significance must be above 0"),
        ("canary:", "canaries:", "section 'canary' is missing"),
    ],
)
def test_mistake_is_one_line_that_names_the_key(tmp_path: Path, old: str, new: str, message: str):
    assert old in TEXT
    with pytest.raises(UserError) as error:
        read_slo(written(tmp_path, TEXT.replace(old, new)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "slo.yaml"
    path.write_text(text)
    return path
