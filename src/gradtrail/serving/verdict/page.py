"""A verdict as one page of HTML, without scripts or anything from elsewhere; and its numbers as texts."""

import math
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gradtrail.serving.verdict.judge import Judgement, Line, Measured
from gradtrail.serving.verdict.measure import WARM

BESIDE = {WARM: "start to first answer with a warm compilation cache"}
_WIDTH = 260.0  # pixels of a drawing


def render(judgement: Judgement, beside: Mapping[str, Measured], about: Mapping[str, str]) -> str:
    """Return the page."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    lines = [
        {
            "title": line.kind.title,
            "name": line.name,
            "value": number(line.measured.value, line.kind.unit) if line.measured else "–",
            "interval": interval(line.measured, line.kind.unit),
            "limit": f"{line.kind.side} {number(line.limit, line.kind.unit)}" if line.limit is not None else "–",
            "margin": margin(line),
            "outcome": line.outcome,
            "state": "none" if not line.is_judged else "pass" if line.is_kept else "fail",
            "how": line.measured.how if line.measured else "",
            "drawing": drawing(line),
        }
        for line in judgement.lines
    ]
    more = [(BESIDE[name], number(found.value, "s"), interval(found, "s"), found.how) for name, found in beside.items()]
    return environment.get_template("page.html.j2").render(
        outcome=judgement.outcome,
        failed=[line.kind.title for line in judgement.failed],
        lines=lines,
        more=more,
        about=about,
        width=_WIDTH,
    )


def drawing(line: Line) -> dict[str, float] | None:
    """Return where interval, value and limit stand in a drawing, in pixels; None where there is nothing to draw."""
    if line.limit is None or line.measured is None or not math.isfinite(line.measured.low + line.measured.high):
        return None
    numbers = (line.limit, line.measured.low, line.measured.value, line.measured.high)
    low, high = min(numbers), max(numbers)
    room = 0.08 * ((high - low) or abs(high) or 1.0)
    scale = _WIDTH / (high - low + 2 * room)
    at = {
        name: (value - low + room) * scale
        for name, value in zip(("limit", "low", "value", "high"), numbers, strict=True)
    }
    good = at["limit"] if line.kind.side == "at least" else 0.0
    return {**at, "good": good, "good_width": _WIDTH - good if line.kind.side == "at least" else at["limit"]}


def number(value: float, unit: str) -> str:
    """Return a number with its unit; shares in per cent."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    if not unit:
        return f"{100 * value:.2f} %"
    digits = 0 if abs(value) >= 1000 else max(0, 2 - math.floor(math.log10(abs(value)))) if value else 2
    return f"{value:,.{min(digits, 4)}f} {unit}"


def interval(found: Measured | None, unit: str) -> str:
    """Return both ends of an interval; of an exact number, that it is one."""
    if found is None:
        return "–"
    if found.low == found.high:
        return "exact"
    low, high = (number(end, unit) for end in (found.low, found.high))
    shown = low.removesuffix(unit).rstrip(" %") if math.isfinite(found.low) else low
    return f"{shown} to {high}"


def margin(line: Line) -> str:
    """Return the room that is left, and how much of the limit that is."""
    if line.margin is None or line.limit is None:
        return "–"
    if not math.isfinite(line.margin):
        return "unknown"
    sign = "+" if line.margin >= 0 else "−"
    if not line.kind.unit:
        return f"{sign}{100 * abs(line.margin):.2f} points"
    return f"{sign}{number(abs(line.margin), line.kind.unit)} ({sign}{abs(line.margin) / line.limit:.0%})"


def finite(value: float | None) -> float | None:
    """Return a number as JSON has it: none that is infinite."""
    return value if value is not None and math.isfinite(value) else None
