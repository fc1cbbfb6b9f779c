"""The report's section on gradients: the stage's summary, its noise scales and its figures."""

import math

from gradtrail.stages.report.components import Figure, Section, Table, count, percent
from gradtrail.stages.report.inputs import Sources
from gradtrail.stages.report.sections.privacy import is_redacted, warning


def gradients_section(sources: Sources) -> Section:
    """Return the summary of the stage with its figures."""
    figures: tuple[Figure, ...] = (_histograms(sources), _relations(sources))
    if not is_redacted(sources):
        figures += (_course(sources), _classes(sources), _influence(sources), *_detection(sources))
    return Section(
        id="gradients",
        title="Per-example gradients",
        summary=_summary_of(sources),
        text=(),
        markdown=sources.summary,
        tables=() if is_redacted(sources) else (_noise_table(sources),),
        figures=figures,
        warning=warning(sources),
    )


def _summary_of(sources: Sources) -> str:
    number = count(sources.metric("gradients", "num_examples"))
    if is_redacted(sources):
        return (
            f"The gradient of the loss of each of {number} validation and test examples: median norm "
            f"{sources.metric('gradients', 'test_grad_norm_median'):.3g} in testing."
        )
    typical = "noise_scale_typical"
    noise = sources.metric("gradients", typical) if typical in sources.metrics["gradients"] else math.inf
    return (
        f"The gradient of the loss of each of {number} examples: median norm "
        f"{sources.metric('gradients', 'grad_norm_median'):.3g} in training, "
        f"{sources.metric('gradients', 'test_grad_norm_median'):.3g} in testing. The typical gradient noise scale is "
        f"{_examples(noise)} examples, at batch size {sources.param('train.batch_size')}."
    )


def _examples(number: float) -> str:
    """Write a noise scale in examples, which is infinite if the mean gradient is indistinguishable from noise."""
    return count(number) if math.isfinite(number) else "unbounded"


def _noise_table(sources: Sources) -> Table:
    table = sources.table("gradients/noise_scale")
    columns = [[_examples(value) for value in table.numbers(name)] for name in ("noise_scale", "low", "high")]
    return Table(
        caption="Gradient noise scale in examples, with its 95% interval",
        header=("epoch", "noise scale", "low", "high"),
        rows=list(zip(table.text("epoch"), *columns, strict=True)),
    )


def _histograms(sources: Sources) -> Figure:
    prefixes = {"validation": "validation_", "test": "test_"}
    if not is_redacted(sources):
        prefixes = {"training": "", **prefixes}
    medians = {split: sources.metric("gradients", f"{prefix}grad_norm_median") for split, prefix in prefixes.items()}
    parts = ", ".join(f"{value:.3g} in the {split} split" for split, value in medians.items())
    return Figure(
        png=sources.figure("gradients/histograms"),
        caption="Per-example gradient norms, by split and by whether the prediction is correct",
        alt=f"Histograms of the gradient norm, by split and by correctness of the prediction. The median is {parts}.",
    )


def _relations(sources: Sources) -> Figure:
    names = {"loss": "the loss", "margin": "the margin", "input_norm": "the input norm"}
    caption = "Gradient norm over loss, margin and input norm; one point per example"
    if is_redacted(sources):
        return Figure(png=sources.figure("gradients/relations"), caption=caption, alt=f"Scatter plots. {caption}.")
    correlations = {name: sources.metric("gradients", f"rank_correlation_{key}") for key, name in names.items()}
    parts = ", ".join(f"{value:+.2f} with {name}" for name, value in correlations.items())
    return Figure(
        png=sources.figure("gradients/relations"),
        caption=caption,
        alt=f"Scatter plots of the gradient norm over loss, margin and input norm. The rank correlation is {parts}.",
    )


def _course(sources: Sources) -> Figure:
    table = sources.table("gradients/noise_scale")
    points = zip(table.numbers("noise_scale"), table.text("epoch"), strict=True)
    parts = ", ".join(f"{_examples(value)} at epoch {epoch}" for value, epoch in points)
    return Figure(
        png=sources.figure("gradients/course"),
        caption="Noise scale by epoch, where it is finite, and rank correlations of the gradient norm",
        alt=f"The noise scale by epoch, {parts}; and rank correlations of the gradient norm with other scores.",
    )


def _classes(sources: Sources) -> Figure:
    table = sources.table("gradients/classes")
    shares = sorted(zip(table.numbers("share"), table.text("class"), strict=True))
    ends = [f"class {name} has {percent(share, 0)}" for share, name in (shares[-1:] + shares[:1])]
    return Figure(
        png=sources.figure("gradients/classes"),
        caption="Gradients by class: red cells are classes with aligned gradients, blue cells with opposed ones",
        alt=(
            f"Cosine and coherence of the gradients of each pair of classes, and each class's share of a gradient "
            f"step's decrease in loss: {', '.join(ends)}."
        ),
    )


def _influence(sources: Sources) -> Figure:
    table = sources.table("gradients/influence")
    tests = list(dict.fromkeys(table.text("test_example")))
    return Figure(
        png=sources.figure("gradients/influence"),
        caption="Test examples, and the training examples that lowered (helped) or raised (hurt) their loss most",
        alt=(
            f"Images of {len(tests)} test examples, #{', #'.join(tests)}, each with the training examples that lowered "
            "or raised its loss most."
        ),
    )


def _detection(sources: Sources) -> tuple[Figure, ...]:
    """Return the figure of how well scores find wrong labels; none without label noise."""
    name = "gradients/label_error_scores"
    if name not in sources.figures:
        return ()
    table = sources.table(name)
    best = list(zip(table.text("score"), table.numbers("average_precision"), strict=True))[:1]
    note = "".join(f" The best is {score}, with an average precision of {value:.3f}." for score, value in best)
    figure = Figure(
        png=sources.figure(name),
        caption="How well each score finds the labels changed by label noise",
        alt=f"Average precision and AUROC of {len(table.rows)} scores in finding the changed labels.{note}",
    )
    return (figure,)
