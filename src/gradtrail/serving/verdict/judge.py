"""Judges measured numbers by the limits of `deploy/slo.yaml`.

A limit passes only if the worse end of the 95 % interval satisfies it. A number on the good side of its limit whose
interval crosses it is inconclusive, which counts as a failure: more data or a quieter machine may decide it. A limit
without a number fails, too.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradtrail.serving.slo import Limits

PASS, FAIL = "pass", "fail"
_NOT_JUDGED = "not judged"
_Side = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A number with its 95 % interval; an end is infinite if the interval has none."""

    value: float
    low: float
    high: float
    how: str  # method of the measurement and its interval, in a few words
    values: tuple[float, ...] = ()  # values of the processes, if several measured it

    def as_json(self) -> dict[str, Any]:
        """Return plain data; infinite numbers are None."""
        return {key: finite(value) if isinstance(value, float) else value for key, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The quantity of a limit."""

    title: str
    unit: str  # empty for a share
    side: _Side  # side of the limit that passes


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
    """One limit with its number and its outcome."""

    name: str  # key in `deploy/slo.yaml`
    kind: Kind
    limit: float | None  # None if it is not judged
    measured: Measured | None  # None if the number is not known
    note: str = ""  # reason why the number is not known, or not judged

    @property
    def is_judged(self) -> bool:
        """Whether the limit counts."""
        return self.limit is not None and not (self.measured is None and self.note.startswith(_NOT_JUDGED))

    @property
    def margin(self) -> float | None:
        """Distance from the limit to the worse end of the interval, in the number's unit; negative if it fails."""
        if self.limit is None or self.measured is None:
            return None
        if self.kind.side == "at least":
            return self.measured.low - self.limit
        return self.limit - self.measured.high

    @property
    def passes(self) -> bool:
        """Whether the worse end of the interval satisfies the limit."""
        return self.margin is not None and self.margin >= 0

    @property
    def is_conclusive(self) -> bool:
        """Whether both ends of the interval are on one side of the limit."""
        if self.limit is None or self.measured is None:
            return False
        better_passes = (
            self.measured.high >= self.limit if self.kind.side == "at least" else self.measured.low <= self.limit
        )
        return self.passes or not better_passes

    @property
    def outcome(self) -> str:
        """Pass, fail, or why it is not judged; a failure whose interval crosses the limit is inconclusive."""
        if not self.is_judged:
            return self.note or _NOT_JUDGED
        if self.measured is None:
            return f"{FAIL}: not known, {self.note}"
        if self.passes:
            return PASS
        return FAIL if self.is_conclusive else f"{FAIL}: inconclusive"

    def as_json(self) -> dict[str, Any]:
        """Return the row of this limit as plain data: number, interval, limit, margin and outcome."""
        return {
            "title": self.kind.title,
            **(self.measured.as_json() if self.measured else {"value": None}),
            "side": self.kind.side,
            "limit": self.limit,
            "unit": self.kind.unit,
            "margin": finite(self.margin),
            "pass": self.passes if self.is_judged else None,
            "verdict": self.outcome,
        }


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All limits of a model, in the order in which they are printed."""

    lines: tuple[Line, ...]

    @property
    def failed(self) -> tuple[Line, ...]:
        """The limits that are judged and do not pass."""
        return tuple(line for line in self.lines if line.is_judged and not line.passes)

    @property
    def outcome(self) -> str:
        """`pass` or `fail`."""
        return FAIL if self.failed else PASS


def judge(limits: Limits, numbers: Mapping[str, Measured], missing: Mapping[str, str]) -> Judgement:
    """Judge numbers.

    Args:
        limits: The limits of `deploy/slo.yaml`.
        numbers: The numbers, by the name of their limit.
        missing: Reasons for missing numbers; a reason that begins with `not judged` excuses the limit.
    """
    lines = [
        Line(
            name=name,
            kind=kind,
            limit=getattr(limits, name),
            measured=_without_nan(numbers.get(name)),
            note=missing.get(name, "" if name in numbers else "not measured"),
        )
        for name, kind in KINDS.items()
    ]
    return Judgement(lines=tuple(lines))


def finite(value: float | None) -> float | None:
    """Return a number; None if it is infinite, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _without_nan(measured: Measured | None) -> Measured | None:
    """Return a measured number; None for NaN, which satisfies no limit."""
    return None if measured is None or math.isnan(measured.value) else measured
