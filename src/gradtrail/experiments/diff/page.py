"""A comparison as one page of HTML, without scripts or external files."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gradtrail.experiments.diff.compare import Comparison
from gradtrail.experiments.diff.tables import all_tables, notes
from gradtrail.experiments.timed.ratio import Ratio

PARTS = ("imports", "data", "compile", "compute", "tracking")


def render(comparison: Comparison, cause: str, ratio: Ratio | None = None) -> str:
    """Return the page."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    sides = (comparison.before, comparison.after)
    longest = max((sum(side.seconds.values()) for side in sides), default=0.0)
    bars = [
        {
            "name": letter,
            "total": sum(side.seconds.values()),
            "parts": [(part, side.seconds[part], 100 * side.seconds[part] / longest) for part in PARTS],
        }
        for letter, side in zip("AB", sides, strict=True)
        if side.seconds
    ]
    return environment.get_template("page.html.j2").render(
        names=[side.name for side in sides],
        stage=comparison.before.stage,
        cause=cause,
        timed=ratio.describe() if ratio else "",
        notes=notes(comparison),
        bars=bars,
        parts=PARTS,
        tables=list(all_tables(comparison)),
    )
