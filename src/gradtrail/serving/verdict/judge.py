"""Judges measured numbers by the limits of `deploy/slo.yaml`.

A limit is kept where the end of the 95 % interval that is worse keeps it. A number on the right side of its limit with
an interval across it is inconclusive, which counts as a failure: more data or a quieter machine may tell. A limit whose
number is not known fails too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gradtrail.serving.slo import Limits

PASS, FAIL = "pass", "fail"
_Side = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A number with its 95 % interval.

    Attributes:
        value: the number.
        low: lower end; −∞ where it has none.
        high: upper end; ∞ where it has none.
        how: how number and interval were found, in a few words.
        values: of the processes, where several measured it.
    """

    value: float
    low: float
    high: float
    how: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a limit is of.

    Attributes:
        title: in words.
        unit: of the number; empty for a share.
        side: which side of the limit is good.
    """

    title: str
    unit: str
    side: _Side


KINDS = {
    "accuracy_lower_bound": Kind(title="accuracy", unit="", side="at least"),
    "calibration_error": Kind(title="calibration error", unit="", side="at most"),
    "worst_class_recall": Kind(title="worst class's recall", unit="", side="at least"),
    "agreement": Kind(title="agreement with the champion", unit="", side="at least"),
    "size_mib": Kind(title="size of the files", unit="MiB", side="at most"),
    "memory_mib": Kind(title="peak memory", unit="MiB", side="at most"),
    "cold_start_seconds": Kind(title="cold start to first answer", unit="s", side="at most"),
    "first_answer_ms": Kind(title="first answer after load", unit="ms", side="at most"),
    "p50_ms_1": Kind(title="p50, 1 image", unit="ms", side="at most"),
    "p99_ms_1": Kind(title="p99, 1 image", unit="ms", side="at most"),
    "p50_ms_32": Kind(title="p50, 32 images", unit="ms", side="at most"),
    "p99_ms_32": Kind(title="p99, 32 images", unit="ms", side="at most"),
    "images_per_second": Kind(title="throughput, largest batch", unit="images/s", side="at least"),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One limit, and what became of it.

    Attributes:
        name: of the limit in `deploy/slo.yaml`.
        kind: what it is of.
        limit: None where it is not judged.
        measured: None where the number is not known.
        note: why a number is not known or not judged.
    """

    name: str
    kind: Kind
    limit: float | None
    measured: Measured | None
    note: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether the limit counts."""
        return self.limit is not None and not (self.measured is None and self.note.startswith("not judged"))

    @property
    def margin(self) -> float | None:
        """How much room the worse end of the interval leaves, in the number's unit; negative past the limit."""
        if self.limit is None or self.measured is None:
            return None
        if self.kind.side == "at least":
            return self.measured.low - self.limit
        return self.limit - self.measured.high

    @property
    def is_kept(self) -> bool:
        """Whether the worse end of the interval keeps the limit."""
        return self.margin is not None and self.margin >= 0

    @property
    def is_conclusive(self) -> bool:
        """Whether both ends of the interval are on one side of the limit."""
        if self.limit is None or self.measured is None:
            return False
        better = self.measured.high if self.kind.side == "at least" else self.measured.low
        is_better_kept = better >= self.limit if self.kind.side == "at least" else better <= self.limit
        return self.is_kept or not is_better_kept

    @property
    def outcome(self) -> str:
        """In words; a failure whose interval crosses the limit is inconclusive."""
        if not self.is_judged:
            return self.note or "not judged"
        if self.measured is None:
            return f"{FAIL}: not known, {self.note}"
        if self.is_kept:
            return PASS
        return FAIL if self.is_conclusive else f"{FAIL}: inconclusive"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All limits of a model.

    Attributes:
        lines: in the order in which they are shown.
    """

    lines: tuple[Line, ...]

    @property
    def failed(self) -> tuple[Line, ...]:
        """The limits that are judged and not kept."""
        return tuple(line for line in self.lines if line.is_judged and not line.is_kept)

    @property
    def outcome(self) -> str:
        """`pass` or `fail`."""
        return FAIL if self.failed else PASS


def judge(limits: Limits, found: Mapping[str, Measured], missing: Mapping[str, str]) -> Judgement:
    """Judge numbers.

    Args:
        limits: of `deploy/slo.yaml`.
        found: the numbers, by the name of the limit.
        missing: why a number is not there; a reason that begins with `not judged` excuses it.
    """
    lines = [
        Line(
            name=name,
            kind=kind,
            limit=getattr(limits, name),
            measured=_finite(found.get(name)),
            note=missing.get(name, "" if name in found else "not measured"),
        )
        for name, kind in KINDS.items()
    ]
    return Judgement(lines=tuple(lines))


def _finite(measured: Measured | None) -> Measured | None:
    """Return a measured number, None for NaN, which keeps no limit."""
    return None if measured is None or math.isnan(measured.value) else measured
