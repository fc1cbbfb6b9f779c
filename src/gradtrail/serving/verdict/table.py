"""The rows of a verdict as texts, for the terminal and for MLflow's table."""

import math
from collections.abc import Mapping
from typing import Any

_MISSING = "–"


def as_texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a row from `Line.as_json`, by the titles of the columns."""
    unit, limit = row["unit"], row["limit"]
    is_known = row["value"] is not None
    return {
        "limit": row["title"],
        "value": format_number(row["value"], unit) if is_known else _MISSING,
        "95 % interval": format_interval(row["low"], row["high"], unit) if is_known else _MISSING,
        "must be": f"{row['side']} {format_number(limit, unit)}" if limit is not None else _MISSING,
        "margin": _format_margin(row["margin"], limit, unit) if is_known and limit is not None else _MISSING,
        "verdict": row["verdict"],
    }


def format_number(value: float, unit: str) -> str:
    """Return a number with its unit; shares in per cent."""
    if not unit:
        return f"{100 * value:.2f} %"
    digits = 0 if abs(value) >= 1000 else max(0, 2 - math.floor(math.log10(abs(value)))) if value else 2
    return f"{value:,.{min(digits, 4)}f} {unit}"


def format_interval(low: float | None, high: float | None, unit: str) -> str:
    """Return both ends of an interval, None for one that is infinite; `exact` if they are equal."""
    if low is not None and low == high:
        return "exact"
    low_text = "−∞" if low is None else format_number(low, unit).removesuffix(unit).rstrip(" %")
    return f"{low_text} to {'∞' if high is None else format_number(high, unit)}"


def _format_margin(margin: float | None, limit: float, unit: str) -> str:
    """Return the margin, and its share of the limit."""
    if margin is None:
        return "unknown"
    sign = "+" if margin >= 0 else "−"
    if not unit:
        return f"{sign}{100 * abs(margin):.2f} points"
    return f"{sign}{format_number(abs(margin), unit)} ({sign}{abs(margin) / limit:.0%})"
