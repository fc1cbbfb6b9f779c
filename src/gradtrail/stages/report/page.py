"""The report: a self-contained HTML page, with equal bytes for equal results.

Its sentences are in the templates beside this module, its numbers in `numbers.py`. All text is escaped: the page runs
no script but its own, whatever the files contain. As a local file it also applies `results/evaluate/model.css`, which
shows that the page is of an earlier model, and `results/comparisons/what_if.css`, which shows what `gradtrail what-if`
found of this model: so the page need not be written again, and no pipeline depends on an optional one.
"""

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from gradtrail.core.config import config
from gradtrail.stages.common.files import digest
from gradtrail.stages.datasets import stands_in_for, title
from gradtrail.stages.dp.guarantee import NOT_COVERED
from gradtrail.stages.report.gallery import Gallery
from gradtrail.stages.report.numbers import Sources, compute_numbers, flops, size

_TEMPLATES = Path(__file__).parent


@config
class ReportConfig:
    """The section `report` of `params.yaml`."""

    title: str  # start of the page's heading; the model and the data set follow

    def check(self) -> None:
        """Raise ValueError for an empty or a very long title."""
        if not 1 <= len(self.title.strip()) <= 200:
            raise ValueError(f"title must have 1 to 200 characters, got {self.title[:200]!r}")


def render(report_config: ReportConfig, sources: Sources, gallery: Gallery) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": lambda number: f"{number:,.0f}",
        "percent": lambda share, digits=2: f"{share:.{digits}%}",
        "form": format_value,
        "param": format_param,
        "flops": flops,
        "size": size,
        "one_line": lambda text: Markup(" ").join(text.split()),
        "markdown": markdown,
        "data_uri": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
    }
    style, script = ((_TEMPLATES / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return environment.get_template("report.html.j2").render(
        heading=report_config.title,
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # results as the stages wrote them
        info=sources.info,
        params=sources.params,
        metrics=sources.metrics,
        costs=sources.costs,
        table=sources.table,
        figure=sources.figure,
        has_figure=sources.has_figure,
        summary=sources.text("gradients/summary.md"),
        guarantee=sources.guarantee,
        # what follows from them
        **compute_numbers(sources),
        dataset=title(sources.info.name),
        is_stand_in=bool(stands_in_for(sources.info.name)),
        is_redacted=sources.is_redacted,
        has_other_loss=not sources.is_redacted and sources.has_other_loss,
        warning=NOT_COVERED if sources.guarantee and not sources.guarantee.release else "",
        gallery=gallery,
        evaluation_digest=digest(sources.folder / "results/evaluate/calibration.json"),
    )


def format_value(value: Any, form: str = "") -> str:
    """Write a number by a format specification, or by `size`; NaN is empty, and a text stays as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not math.isfinite(value):
        return "" if math.isnan(value) else "unbounded"
    return size(value) if form == "size" else format(value, form)


def format_param(value: Any) -> str:
    """Write a param as in `params.yaml`."""
    if isinstance(value, list):
        return f"[{', '.join(map(format_param, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def markdown(text: str) -> Markup:
    """Return Markdown as HTML: paragraphs, code, the title as a lead, and other headings below that of a section."""
    reader = MarkdownIt("zero").enable(["heading", "backticks"])
    tokens = reader.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            level = int(token.tag[1])
            token.tag = "p" if level == 1 else f"h{min(level + 1, 6)}"
            if level == 1 and token.nesting == 1:
                token.attrSet("class", "lead")
    return Markup(reader.renderer.render(tokens, reader.options, {}))  # noqa: S704 - made from escaped text
