"""`summary.md`: the results of the gradient analysis; its sentences are in the template `summary.md.j2`."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gradtrail.core.gradients.analysis import GradientsConfig
from gradtrail.core.noise_scale import NoiseScale
from gradtrail.stages.data.parquet import with_class_names
from gradtrail.stages.dp.guarantee import NOT_COVERED, REDACTED, PrivacyGuarantee
from gradtrail.stages.gradients import every_example
from gradtrail.stages.gradients.outputs import Results, measure

_NAMED = 5  # examples that a sentence names
_STRONG = 0.5  # rank correlation


def summarize(
    title: str,
    results: Results,
    config: GradientsConfig,
    batch_size: int,
    guarantee: PrivacyGuarantee | None = None,
    every: Mapping[str, float] | None = None,
) -> str:
    """Return the summary in Markdown.

    Args:
        title: model, weights and data set.
        batch_size: batch size of the training.
        guarantee: guarantee of a private training.
        every: metrics of `score_every_example`, if it was called.
    """
    tables, metrics = results.tables, measure(results.tables, results.analysis)
    suspects = tables.suspects.groupby("split", observed=True)
    values: dict[str, Any] = {
        "title": title,
        "tables": tables,
        "results": results,
        "config": config,
        "notes": [] if guarantee is None else [REDACTED if guarantee.release else NOT_COVERED],
        "every": every,
        "every_name": every_example.NAME,
        "metrics": metrics,
        "suspects": {split: ranked.head(_NAMED).to_dict("records") for split, ranked in suspects},
        "detection": next(iter(tables.label_error_scores.to_dict("records")), None),
        "batch_size": batch_size,
    }
    if tables.has_training_rows:
        values |= _training_values(results, metrics)
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - Markdown
    environment.filters["f"] = format
    text = environment.get_template("summary.md.j2").render(values)
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _training_values(results: Results, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of the template that are about training examples."""
    reasons = {
        "the loss": metrics["rank_correlation_loss"],
        "the negative margin": -metrics["rank_correlation_margin"],
        "the input norm": metrics["rank_correlation_input_norm"],
    }
    reason = max(reasons, key=lambda name: reasons[name])
    first = metrics["first_grad_norm_rank_correlation_input_norm"]
    strength = "hardly" if abs(first) < 0.2 else "weakly" if abs(first) < _STRONG else "strongly"
    train, analysis, classes = results.tables.train, results.analysis, results.classes
    share = analysis.classes.share
    largest = train.nlargest(_NAMED, "grad_norm", keep="first")
    return {
        "largest": with_class_names(largest, classes).to_dict("records"),
        "reason": {"name": reason, "correlation": reasons[reason]},
        "first_epoch": min(analysis.noise_scales),
        "input_norm_correlation": first,
        "strength": f"{strength} correlated",
        "is_strong": first >= _STRONG,
        "noise_scales": {epoch: _interval(scale) for epoch, scale in analysis.noise_scales.items()},
        "sharpness": analysis.sharpness,
        "typical": metrics.get("noise_scale_typical"),
        "share": {
            "largest": classes[int(np.nanargmax(share))],
            "most": np.nanmax(share),
            "smallest": classes[int(np.nanargmin(share))],
            "least": np.nanmin(share),
        },
        "forgotten": (train["forgetting_events"] > 0).mean(),
    }


def _interval(scale: NoiseScale) -> str:
    """Return a noise scale with its interval: numbers of examples, whole from 10 on, else with two digits."""

    def number(examples: float) -> str:
        if not math.isfinite(examples):
            return "unbounded"
        return f"{examples:,.0f}" if examples >= 10 else f"{examples:.2g}"

    if not math.isfinite(scale.value):
        return "unbounded"
    return f"{number(scale.value)} ({number(scale.low)} to {number(scale.high)})"
