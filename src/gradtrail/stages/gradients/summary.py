"""`summary.md`: the results of the gradient analysis in sentences, written from its tables and metrics alone."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from gradtrail.core.common.split import Split
from gradtrail.core.gradients.analysis import GradientAnalysis, GradientsConfig
from gradtrail.core.gradients.exact import ERROR, NUM_EXAMPLES
from gradtrail.core.per_example.noise_scale import NoiseScale
from gradtrail.stages.artifacts.members import format_seeds
from gradtrail.stages.artifacts.privacy import NOT_COVERED, RELEASED, PrivacyGuarantee
from gradtrail.stages.gradients import every_example
from gradtrail.stages.gradients.outputs import Analyses, Tables, measure, typical_noise_scale

_NAMED = 5  # examples that a sentence names
_STRONG = 0.5  # rank correlation


def summarize(
    title: str,
    tables: Tables,
    analyses: Analyses,
    config: GradientsConfig,
    batch_size: int,
    notes: Sequence[str] = (),
) -> str:
    """Return the summary in Markdown.

    Args:
        title: model, weights and data set.
        tables: the stage's tables.
        analyses: analyses behind the tables.
        config: the section `gradients` of `params.yaml`.
        batch_size: batch size of the training.
        notes: paragraphs below the heading, see `make_notes`.
    """
    analysis = analyses.first
    metrics = measure(tables, analysis)
    sections = {"Suspected label errors": _suspects(tables, metrics)}
    if tables.has_training_rows:
        sections = {"Largest gradients": _largest(tables, metrics, config), **sections}
        sections |= {
            "Gradient noise scale": _noise(analysis, batch_size),
            "Classes": _classes(analysis),
            "Learning": _learning(tables, metrics),
        }
    if analyses.errors:
        sections["Numerical errors"] = _errors(
            {name.removeprefix(ERROR): error for name, error in analyses.errors.items()}
        )
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    parts = [f"# Summary of per-example gradients: {title}", *notes, *_members(analyses.seeds), body]
    return "\n\n".join(parts) + "\n"


def make_notes(
    guarantee: PrivacyGuarantee | None, every: Mapping[str, float], sampled: Mapping[str, int], train: Split
) -> list[str]:
    """Return paragraphs on the privacy of the training, and on the use of a sample of the training examples.

    Args:
        guarantee: guarantee of a private training.
        every: metrics of `score_every_example`; empty if it was not called.
        sampled: result of `sample_metrics`.
        train: training examples, of which the analyzed ones may be a sample.
    """
    analyzed = sampled.get("sampled_train_examples", len(train))
    notes = [] if guarantee is None else [RELEASED if guarantee.release else NOT_COVERED]
    if every:
        notes.append(
            f"The training split has {every['every_example/examples']:,.0f} examples. What follows is of "
            f"{analyzed:,} of them, evenly spaced; the scores of all are in `{every_example.NAME}`: their mean "
            f"gradient norm is {every['every_example/grad_norm_mean']:.3g}, the largest "
            f"{every['every_example/grad_norm_max']:.3g}, and {every['every_example/misclassified']:.2%} of them are "
            "misclassified."
        )
    elif sampled:
        notes.append(
            f"What follows is of {analyzed:,} of the {len(train):,} training examples, evenly spaced, and of all "
            "others: with this network, all would take longer than four epochs of training. `gradients.examples: all` "
            "analyzes all of them."
        )
    return notes


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
    parts = ", ".join(
        f"{errors[name]:.2g} of {name.removeprefix(ERROR)}" for name in sorted(errors, key=lambda key: -errors[key])
    )
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
