"""The report: a self-contained HTML page, with equal bytes for equal results.

The sections' content is made in `sections/`; this module renders it. All text is escaped, and Markdown may contain
neither HTML nor links nor images: the page loads nothing and runs nothing, whatever the files contain.
"""

import base64
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
from gradtrail.stages.report.components import Section, Tile, count, percent
from gradtrail.stages.report.inputs import Png, Sources
from gradtrail.stages.report.sections.costs import costs_section
from gradtrail.stages.report.sections.evaluation import evaluation_section, interval
from gradtrail.stages.report.sections.gradients import examples, gradients_section, typical_noise
from gradtrail.stages.report.sections.training import data_section, model_name, training_section

_TEMPLATES = Path(__file__).parent
_LONGEST_TITLE = 200
_NOT_IN_MARKDOWN = ("html_block", "html_inline", "image", "link", "autolink", "reference")
_LOWEST_HEADING = 6


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The section `report` of `params.yaml`.

    Attributes:
        title: heading of the page.
    """

    title: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.title.strip()) <= _LONGEST_TITLE:
            raise ValueError(f"title must have 1 to {_LONGEST_TITLE} characters, got {self.title[:_LONGEST_TITLE]!r}")


@dataclass(frozen=True, kw_only=True)
class StageLineage:
    """What a stage reads and writes, path → digest, and its params, dotted key → value."""

    name: str
    reads: Mapping[str, str]
    writes: Mapping[str, str]
    params: Mapping[str, str]


def sections_of(sources: Sources) -> list[Section]:
    """Return the sections in the order of the page; lineage, the last one, is in the template."""
    makers = (data_section, training_section, evaluation_section, gradients_section, costs_section)
    return [make(sources) for make in makers]


def render(config: ReportConfig, sources: Sources, sections: list[Section]) -> str:
    """Return the page."""
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
        title=config.title,
        model=model_name(sources),
        info=sources.info,
        tiles=_tiles(sources),
        sections=sections,
        lineage=_lineage(sources),
        versions=sources.versions,
    )


def measure(sources: Sources, sections: list[Section], page: str) -> dict[str, Any]:
    """Return the metrics: the data set, the number of figures, and the size of the page."""
    figures = sum(len(section.figures) for section in sections)
    return {**sources.info.as_metrics(), "num_pictures": figures, "size_bytes": len(page.encode())}


def _tiles(sources: Sources) -> list[Tile]:
    wrong, total = (count(sources.metric("evaluate", key)) for key in ("num_mistakes", "num_examples"))
    epochs, steps = (count(sources.metric("train", key)) for key in ("epochs", "steps"))
    error = sources.metric("evaluate", "expected_calibration_error")
    return [
        Tile(
            name="Test accuracy",
            value=percent(sources.metric("evaluate", "accuracy")),
            note=f"{interval(sources)} (95%)",
        ),
        Tile(name="Mistakes", value=wrong, note=f"of {total} test examples"),
        Tile(name="Test loss", value=f"{sources.metric('evaluate', 'loss'):.4f}", note="nats per example"),
        Tile(name="Calibration error", value=f"{error:.4f}", note="expected calibration error"),
        Tile(name="Parameters", value=count(sources.metric("train", "num_parameters")), note=model_name(sources)),
        Tile(name="Epochs", value=epochs, note=f"{steps} steps"),
        Tile(
            name="Gradient noise scale",
            value=examples(typical_noise(sources)),
            note=f"typical value; batch size {sources.param('train.batch_size')}",
        ),
    ]


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


def _data_uri(png: Png) -> str:
    return f"data:image/png;base64,{base64.b64encode(png.data).decode()}"


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
