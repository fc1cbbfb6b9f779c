"""The report: a self-contained HTML page, with equal bytes for equal results.

The sections' content is made in `sections/`; this module renders it. All text is escaped, and Markdown may contain
neither HTML nor links nor images: the page loads nothing and runs no script but its own, whatever the files contain.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.common.pipeline_file import StageSpec, values_of
from gradtrail.stages.datasets import stands_in_for
from gradtrail.stages.report import charts
from gradtrail.stages.report.components import Section
from gradtrail.stages.report.inputs import Sources
from gradtrail.stages.report.sections.costs import costs_section
from gradtrail.stages.report.sections.evaluation import evaluation_section
from gradtrail.stages.report.sections.examples import SCORES, Gallery, make_gallery
from gradtrail.stages.report.sections.gradients import gradients_section
from gradtrail.stages.report.sections.overview import Overview, make_overview
from gradtrail.stages.report.sections.privacy import headline, privacy_sections, warning
from gradtrail.stages.report.sections.training import data_section, dataset_name, model_name, training_section

_TEMPLATES = Path(__file__).parent
_LONGEST_TITLE = 200
_NOT_IN_MARKDOWN = ("html_block", "html_inline", "image", "link", "autolink", "reference")
_LOWEST_HEADING = 6


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The section `report` of `params.yaml`."""

    title: str  # start of the page's heading; the model and the data set follow

    def __post_init__(self) -> None:
        if not 1 <= len(self.title.strip()) <= _LONGEST_TITLE:
            raise ValueError(f"title must have 1 to {_LONGEST_TITLE} characters, got {self.title[:_LONGEST_TITLE]!r}")


@dataclass(frozen=True, kw_only=True)
class StageLineage:
    """The inputs and outputs of a stage, path → digest, and its params, dotted key → value."""

    name: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    params: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything on the page but lineage: the first screen, the gallery, and the sections in their order."""

    overview: Overview
    gallery: Gallery
    sections: list[Section]


def make_content(sources: Sources) -> Content:
    """Return the content of the page."""
    first, rest = (evaluation_section, training_section), (data_section, gradients_section, costs_section)
    return Content(
        overview=make_overview(sources),
        gallery=make_gallery(sources),
        sections=[
            *(make(sources) for make in first),
            *privacy_sections(sources),
            *(make(sources) for make in rest),
        ],
    )


def render(config: ReportConfig, sources: Sources, content: Content) -> str:
    """Return the page."""
    style, script = ((_TEMPLATES / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"data_uri": _data_uri, "markdown": _markdown}
    return environment.get_template("report.html.j2").render(
        title=f"{config.title}: {model_name(sources)} on {dataset_name(sources)}",
        info=sources.info,
        stand_in=dataset_name(sources) if stands_in_for(sources.info.name) else "",
        content=content,
        scores=SCORES,
        size=(charts.WIDTH, charts.HEIGHT),
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        confusion=sources.figures.get("evaluate/confusion"),
        privacy=headline(sources),
        not_covered=warning(sources),
        lineage=_lineage(sources),
        versions=sources.versions,
    )


def measure(sources: Sources, content: Content, page: str) -> dict[str, Any]:
    """Return the metrics: the data set, the numbers of figures and of images in the gallery, the size of the page."""
    return {
        **sources.info.as_metrics(),
        "num_figures": sum(len(section.figures) for section in content.sections),
        "num_images": len(content.gallery.examples),
        "size_bytes": len(page.encode()),
    }


def _lineage(sources: Sources) -> list[StageLineage]:
    return [
        StageLineage(
            name=stage,
            reads={path: sources.digests[path] for path in spec.data_deps},
            writes={path: sources.digests[path] for path in spec.outs},
            params=_params(sources, spec),
        )
        for stage, spec in sources.stages.items()
    ]


def _params(sources: Sources, spec: StageSpec) -> dict[str, str]:
    values = values_of(sources.params, spec.params.get("params.yaml", ()), "params.yaml")
    return {key: _value(value) for key, value in flatten(values).items()}


def _value(value: Any) -> str:
    """Write a param as in `params.yaml`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _markdown(text: str) -> Markup:
    """Return Markdown as HTML with headings below that of a section; a heading of the first level becomes its lead."""
    reader = MarkdownIt("commonmark", {"html": False}).disable(_NOT_IN_MARKDOWN)
    tokens = reader.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            _fit_heading(token)
    return Markup(reader.renderer.render(tokens, reader.options, {}))  # noqa: S704 - made from escaped text


def _fit_heading(token: Token) -> None:
    level = int(token.tag[1])
    token.tag = "p" if level == 1 else f"h{min(level + 1, _LOWEST_HEADING)}"
    if level == 1 and token.nesting == 1:
        token.attrSet("class", "lead")
