"""What the gradients of single examples say, in sentences: `summary.md`, from the figures alone."""

import math
import sys

import pandas as pd

from gradtrail.core.gradients.analysis import GradientAnalysis
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.nn.models import Model
from gradtrail.core.per_example.noise_scale import NoiseScale
from gradtrail.core.per_example.norms import unknown_layers
from gradtrail.stages.gradients.tables import Tables, typical_noise_scale

_NAMED = 5  # examples that a sentence names


def in_words(
    title: str,
    tables: Tables,
    analysis: GradientAnalysis,
    metrics: dict[str, float],
    config: GradientsConfig,
    batch_size: int,
) -> str:
    """Return the summary in Markdown; every sentence follows from the tables and metrics of the same folder."""
    sections = {
        "Largest gradients": _largest(tables, metrics, config),
        "Labels that look wrong": _suspects(tables, metrics),
        "Noise": _noise(analysis, batch_size),
        "Classes": _classes(analysis),
        "Learning": _learning(tables, metrics),
    }
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    return f"# What the gradients say: {title}\n\n{body}\n"


def tell_unknown_layers(model: Model) -> None:
    """Say which layers go by the definition, and so are slow, in a line on stderr; nothing where all are known."""
    names = unknown_layers(model)
    if names:
        print(
            f"gradients: {', '.join(names)}: by vmap(grad), having no way of their own, which is slow", file=sys.stderr
        )


def _largest(tables: Tables, metrics: dict[str, float], config: GradientsConfig) -> str:
    top = tables.train.nlargest(_NAMED, "grad_norm", keep="first")
    named = ", ".join(f"#{row.example_id} (a {row.label}, predicted {row.predicted})" for row in top.itertuples())
    reasons = {
        "the loss": metrics["rank_correlation_loss"],
        "a small margin": -metrics["rank_correlation_margin"],
        "the ink on the page": metrics["rank_correlation_input_norm"],
    }
    reason = max(reasons, key=lambda name: reasons[name])
    first = metrics["first_grad_norm_rank_correlation_input_norm"]
    return (
        f"The median norm of an example's gradient is {metrics['grad_norm_median']:.3g}, the largest "
        f"{metrics['grad_norm_max']:.3g}. The {config.top_fraction:.1%} of the training examples with the largest hold "
        f"{metrics['norm_held_by_largest']:.0%} of all norm; {metrics['misclassified_among_largest']:.0%} of them are "
        f"misclassified, against {metrics['misclassified_overall']:.2%} of all. The ranking goes most with {reason} "
        f"(rank correlation {reasons[reason]:.2f}). The largest are {named}. At the first kept epoch the norm is "
        f"{_strength(first)} with the ink on the page ({first:+.2f}): the less a score differs from that "
        "baseline, the less it says."
    )


def _suspects(tables: Tables, metrics: dict[str, float]) -> str:
    sentences = []
    for split, ranked in tables.suspects.items():
        named = ", ".join(
            f"#{row.example_id} (given {row.label}, predicted {row.predicted}, {row.probability:.0%} for the given one)"
            for row in ranked.head(_NAMED).itertuples()
        )
        sentences.append(f"In the {split} split the labels least believed over the training are {named}.")
    noisy = tables.label_error_scores
    if len(noisy) and "label_errors_auroc" in metrics:
        best = noisy.iloc[0]
        at = f" at epoch {best.epoch}" if str(best.epoch).isdigit() else ", averaged" if best.epoch == "mean" else ""
        sentences.append(
            f"Of the labels that noise made wrong, {metrics['label_errors_precision']:.1%} are among as many suspects "
            f"(AUROC {metrics['label_errors_auroc']:.4f}, average precision "
            f"{metrics['label_errors_average_precision']:.4f}); the best of all scores is {best.score}{at} (average "
            f"precision {best.average_precision:.4f})."
        )
    return " ".join(sentences)


def _noise(analysis: GradientAnalysis, batch_size: int) -> str:
    points = ", ".join(f"{_examples(found)} at epoch {epoch}" for epoch, found in analysis.noise_scales.items())
    typical = typical_noise_scale(analysis)
    if typical is None:
        return f"At no kept epoch does the mean gradient stand out from its noise ({points})."
    verdict = (
        "smaller than that: its steps are mostly noise, and a larger one would make better steps"
        if batch_size < typical / 2
        else "larger than that: a smaller one would make about as good steps for less work"
        if batch_size > 2 * typical
        else "near that, where neither steps nor examples are wasted"
    )
    return (
        f"The gradient noise scale is {points}. The batch of {batch_size} is {verdict} (typical value {typical:,.0f})."
    )


def _classes(analysis: GradientAnalysis) -> str:
    classes = analysis.classes
    share = pd.Series(classes.share)
    return (
        f"Class {share.idxmax()} holds the largest share of the mean gradient, {share.max():.0%}, class "
        f"{share.idxmin()} the smallest, {share.min():.0%}. Two gradients of one class have a coherence of "
        f"{classes.within:.4f} on average, those of different classes {classes.across:.4f}."
    )


def _learning(tables: Tables, metrics: dict[str, float]) -> str:
    forgotten = (tables.train["forgetting_events"] > 0).mean()
    return (
        f"{metrics['never_correct']:.2%} of the training examples were right at no visit, {forgotten:.1%} were "
        f"forgotten at least once; an example was forgotten {metrics['forgetting_events_mean']:.2f} times on average."
    )


def _examples(found: NoiseScale) -> str:
    if not math.isfinite(found.value):
        return "beyond measure"
    high = f"{found.high:,.0f}" if math.isfinite(found.high) else "beyond measure"
    return f"{found.value:,.0f} ({found.low:,.0f} to {high})"


def _strength(correlation: float) -> str:
    size = abs(correlation)
    return "hardly correlated" if size < 0.2 else "weakly correlated" if size < 0.5 else "strongly correlated"
