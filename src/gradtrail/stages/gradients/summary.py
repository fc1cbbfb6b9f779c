"""`summary.md`: the results of the gradient analysis in sentences, written from its tables and metrics alone."""

import math
import sys
from collections.abc import Mapping, Sequence

import pandas as pd

from gradtrail.core.gradients.analysis import GradientAnalysis
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.exact import ERROR, LIMITS, NUM_EXAMPLES
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.models import Model
from gradtrail.core.noise_scale import NoiseScale
from gradtrail.core.per_example import unknown_layers
from gradtrail.stages.artifacts.members import format_seeds
from gradtrail.stages.artifacts.privacy import NOT_COVERED, RELEASED, PrivacyGuarantee
from gradtrail.stages.gradients.tables import Tables, typical_noise_scale

_NAMED = 5  # examples that a sentence names
_STRONG = 0.5  # rank correlation


def summarize(
    title: str,
    tables: Tables,
    analysis: GradientAnalysis,
    metrics: dict[str, float],
    config: GradientsConfig,
    batch_size: int,
    seeds: Sequence[int],
) -> str:
    """Return the summary in Markdown.

    Args:
        title: model, weights and data set.
        tables: the stage's tables.
        analysis: analysis behind the tables; of several members, that of the first.
        metrics: metrics of these tables.
        config: the section `gradients` of `params.yaml`.
        batch_size: batch size of the training.
        seeds: seeds of the members.
    """
    sections = {"Suspected label errors": _suspects(tables, metrics)}
    if tables.has_training_rows:
        sections = {"Largest gradients": _largest(tables, metrics, config), **sections}
        sections |= {
            "Gradient noise scale": _noise(analysis, batch_size),
            "Classes": _classes(analysis),
            "Learning": _learning(tables, metrics),
        }
    if errors := {name.removeprefix(ERROR): value for name, value in metrics.items() if name.startswith(ERROR)}:
        sections["Numerical errors"] = _errors(errors)
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    parts = [f"# Summary of per-example gradients: {title}", *_members(seeds), body]
    return "\n\n".join(parts) + "\n"


def with_privacy_note(words: str, guarantee: PrivacyGuarantee | None, every_example: str = "") -> str:
    """Return the summary with notes below its heading: the privacy of the training, and the use of a sample."""
    notes = [] if guarantee is None else [RELEASED if guarantee.release else NOT_COVERED]
    heading, _, rest = words.partition("\n\n")
    return "\n\n".join([heading, *notes, *([every_example] if every_example else []), rest])


def warn_of_unknown_layers(model: Model) -> None:
    """Warn on stderr, in one line, of layers whose per-example gradients have no fast implementation."""
    if names := unknown_layers(model):
        print(
            f"gradients: warning: no fast per-example gradients for {', '.join(names)}; falling back to vmap(grad), "
            "which is slow",
            file=sys.stderr,
        )


def warn_of_errors(errors: Mapping[str, float], precision: Precision) -> None:
    """Warn on stderr, in one line, of a score whose error is larger than the model's precision explains."""
    large = {name: value for name, value in errors.items() if not value <= LIMITS[precision]}  # also NaN
    if large:
        name = max(large, key=lambda key: large[key])
        print(
            f"gradients: warning: {name.removeprefix(ERROR)} differs from its float64 value by {errors[name]:g}, "
            f"relative; up to {LIMITS[precision]:g} is usual for {precision}",
            file=sys.stderr,
        )


def _members(seeds: Sequence[int]) -> list[str]:
    """Return a sentence on which results are means over several members."""
    if len(seeds) == 1:
        return []
    return [
        f"Scores are means over {len(seeds)} networks, {format_seeds(seeds)}, and the prediction is "
        f"that of most of them. Noise scale, classes and influences are those of the network with seed {seeds[0]}. An "
        "example counts as never correct if no network got it right, and as forgotten if at least one forgot it."
    ]


def _largest(tables: Tables, metrics: dict[str, float], config: GradientsConfig) -> str:
    top = tables.train.nlargest(_NAMED, "grad_norm", keep="first")
    examples = ", ".join(
        f"#{row.example_id} (label {row.label}, predicted {row.predicted})" for row in top.itertuples()
    )
    reasons = {
        "the loss": metrics["rank_correlation_loss"],
        "the negative margin": -metrics["rank_correlation_margin"],
        "the input norm": metrics["rank_correlation_input_norm"],
    }
    reason = max(reasons, key=lambda name: reasons[name])
    first = metrics["first_grad_norm_rank_correlation_input_norm"]
    alike = " and ranks the examples much alike" if first >= _STRONG else ""
    return (
        f"On the training split the median gradient norm is {metrics['grad_norm_median']:.3g} and the maximum "
        f"{metrics['grad_norm_max']:.3g}. The {config.top_fraction:.1%} of the examples with the largest norms account "
        f"for {metrics['norm_held_by_largest']:.0%} of the sum of all norms; "
        f"{metrics['misclassified_among_largest']:.0%} of them are misclassified, compared with "
        f"{metrics['misclassified_overall']:.2%} of all training examples. The norm correlates most with {reason} "
        f"(rank correlation {reasons[reason]:.2f}). The largest norms are those of {examples}. At epoch "
        f"{tables.noise_scale['epoch'].min()} the norm is {_strength(first)} with the input norm ({first:+.2f}), a "
        f"score that needs no model{alike}."
    )


def _suspects(tables: Tables, metrics: dict[str, float]) -> str:
    sentences = []
    for split, ranked in tables.suspects.items():
        if not len(ranked):
            continue
        examples = ", ".join(
            f"#{row.example_id} (label {row.label}, predicted {row.predicted}, {row.probability:.0%})"
            for row in ranked.head(_NAMED).itertuples()
        )
        sentences.append(
            f"In the {split} split, the labels with the lowest mean probability over the training are those of "
            f"{examples}."
        )
    sentences.append("The percentages are the probabilities of the labels with the weights named above.")
    noisy = tables.label_error_scores
    if len(noisy) and "label_errors_auroc" in metrics:
        best = noisy.iloc[0]
        place = f" at epoch {best.epoch}" if str(best.epoch).isdigit() else ", averaged" if best.epoch == "mean" else ""
        sentences.append(
            f"Of the labels changed by label noise, {metrics['label_errors_precision']:.1%} are found among as many "
            f"suspects (AUROC {metrics['label_errors_auroc']:.4f}, average precision "
            f"{metrics['label_errors_average_precision']:.4f}); the best score is {best.score}{place} (average "
            f"precision {best.average_precision:.4f})."
        )
    return " ".join(sentences)


def _noise(analysis: GradientAnalysis, batch_size: int) -> str:
    typical = typical_noise_scale(analysis)
    if typical is None:
        return "The gradient noise scale is unbounded at every epoch: the mean gradient cannot be told from noise."
    verdict = (
        "less than half of that: its steps are mostly noise, and a larger batch would make better ones"
        if batch_size < typical / 2
        else "more than twice that: a smaller batch would make about as good steps with less work"
        if batch_size > 2 * typical
        else "close to that, a good trade-off between the number of steps and the work of each"
    )
    points = ", ".join(
        f"{_examples(noise_scale)} at epoch {epoch}" for epoch, noise_scale in analysis.noise_scales.items()
    )
    unbounded = any(not math.isfinite(noise_scale.value) for noise_scale in analysis.noise_scales.values())
    reason = " It is unbounded where the mean gradient cannot be told from noise." if unbounded else ""
    return (
        f"The gradient noise scale in examples, with its 95% interval, is {points}.{reason} A typical value is "
        f"{typical:,.0f}; the batch size {batch_size} is {verdict}."
    )


def _classes(analysis: GradientAnalysis) -> str:
    classes = analysis.classes
    share = pd.Series(classes.share)
    least = f"class {share.idxmin()}"
    smallest = (
        f"the loss of {least} increases, by {-share.min():.0%} of the decrease"
        if share.min() < 0
        else f"{least} has the smallest share ({share.min():.0%})"
    )
    return (
        f"To first order, a full-batch gradient step decreases the training loss: class {share.idxmax()} has the "
        f"largest share of the decrease ({share.max():.0%}), {smallest}. The mean coherence of two examples' gradients "
        f"is {classes.within:.4f} within a class and {classes.across:.4f} across classes."
    )


def _learning(tables: Tables, metrics: dict[str, float]) -> str:
    forgotten = (tables.train["forgetting_events"] > 0).mean()
    return (
        f"{metrics['never_correct']:.2%} of the training examples were never classified correctly during training, and "
        f"{forgotten:.1%} were forgotten at least once. On average an example was forgotten "
        f"{metrics['forgetting_events_mean']:.2f} times."
    )


def _errors(errors: Mapping[str, float]) -> str:
    """Return a sentence on the errors of the scores against float64."""
    parts = ", ".join(f"{errors[name]:.2g} of {name}" for name in sorted(errors, key=lambda key: -errors[key]))
    return (
        f"The scores of {NUM_EXAMPLES} examples, or of all where there are fewer, evenly spaced over all splits, were "
        f"computed again in float64, one gradient after the other. The largest errors of this sample, relative to the "
        f"float64 score or to its root mean square, whichever is larger, are {parts}."
    )


def _examples(noise_scale: NoiseScale) -> str:
    if not math.isfinite(noise_scale.value):
        return "unbounded"
    return f"{_number(noise_scale.value)} ({_number(noise_scale.low)} to {_number(noise_scale.high)})"


def _number(examples: float) -> str:
    """Return a number of examples: whole from 10 on, else with two digits."""
    if not math.isfinite(examples):
        return "unbounded"
    return f"{examples:,.0f}" if examples >= 10 else f"{examples:.2g}"


def _strength(correlation: float) -> str:
    size = abs(correlation)
    return "hardly correlated" if size < 0.2 else "weakly correlated" if size < _STRONG else "strongly correlated"
