"""The report's section on the evaluation on the test split, from params, metrics and tables alone."""

from collections import Counter

from markupsafe import Markup

from gradtrail.stages.report.components import Section, Table, count, percent, size
from gradtrail.stages.report.inputs import Sources
from gradtrail.stages.report.sections.members import how_good, member_tables, num_members, served

CORRECTED = "accuracy_corrected_labels"  # metric of runs with corrected test labels
_CONFUSIONS = 10  # mistakes in the list
_WELL_CALIBRATED = 0.005  # largest difference of confidence and accuracy that counts as calibrated


def evaluation_section(sources: Sources) -> Section:
    """Describe the accuracy, the classes and the calibration of the predictions."""
    confusions = _confusions(sources)
    return Section(
        id="evaluation",
        title="Evaluation",
        text=(
            _how_good(sources),
            _classes(sources, confusions),
            _calibration(sources),
            _export(sources),
        ),
        tables=(
            _per_class(sources),
            Table(
                caption="Most frequent mistakes",
                header=("label", "predicted", "examples"),
                rows=[(label, predicted, count(number)) for (label, predicted), number in confusions[:_CONFUSIONS]],
            ),
            _mistakes(sources),
            _bins(sources),
            *member_tables(sources),
        ),
    )


def _confusions(sources: Sources) -> list[tuple[tuple[str, str], int]]:
    """Return ((label, predicted), count) of the wrong predictions, the most frequent first."""
    table = sources.table("evaluate/classes")
    pairs = Counter(
        pair for pair in zip(table.text("label"), table.text("predicted"), strict=True) if len(set(pair)) > 1
    )
    return sorted(pairs.items(), key=lambda item: (-item[1], item[0]))


def interval(sources: Sources, name: str = "accuracy") -> str:
    """Return the interval of an accuracy on the test split, such as `98.34% to 98.80%`."""
    return " to ".join(percent(sources.metric("evaluate", f"{name}_{end}")) for end in ("low", "high"))


def verdict(sources: Sources) -> str:
    """Return whether the model is overconfident, underconfident or well calibrated, on average."""
    gap = _confidence(sources) - served(sources, "accuracy")
    if abs(gap) < _WELL_CALIBRATED:
        return "well calibrated"
    return "overconfident" if gap > 0 else "underconfident"


def _how_good(sources: Sources) -> str:
    if num_members(sources) > 1:
        return how_good(sources) + _corrected_accuracy(sources)
    total, wrong = sources.metric("evaluate", "num_examples"), sources.metric("evaluate", "num_mistakes")
    return (
        f"With the {sources.param('evaluate.weights')} weights (epoch {sources.metric('evaluate', 'epoch'):g}), "
        f"{count(total - wrong)} of {count(total)} test examples are classified correctly and {count(wrong)} are not: "
        f"an accuracy of {percent(sources.metric('evaluate', 'accuracy'))} (95% interval: {interval(sources)}). The "
        f"test loss is {sources.metric('evaluate', 'loss'):.3g} nats per example.{_corrected_accuracy(sources)}"
    )


def _export(sources: Sources) -> Markup:
    """Return a sentence on the program that answers so, with a link to its digest."""
    return Markup(
        'The stage <code>export</code> wrote this model as a program that needs no Flax, <a href="#lineage">'
        "<code>models/export</code></a>: {size}, with probabilities that differ from those of the evaluation by "
        "{most:.1g} at most."
    ).format(size=size(sources.metric("export", "size_bytes")), most=sources.metric("export", "largest_difference"))


def _corrected_accuracy(sources: Sources) -> str:
    """Return a sentence on the second accuracy; nothing if no test label was corrected."""
    if CORRECTED not in sources.metrics["evaluate"]:
        return ""
    accuracy, number = sources.metric("evaluate", CORRECTED), sources.metric("preprocess", "test_corrected_labels")
    return (
        f" With the {count(number)} corrected test labels in place of the given ones the accuracy is "
        f"{percent(accuracy)} (95% interval: {interval(sources, CORRECTED)})."
    )


def _classes(sources: Sources, confusions: list[tuple[tuple[str, str], int]]) -> str:
    table = sources.table("evaluate/per_class")
    f1 = dict(zip(table.text("class"), table.numbers("f1"), strict=True))
    if not f1 or not confusions:
        return "No example of any class is misclassified."
    worst, best = min(f1, key=lambda name: f1[name]), max(f1, key=lambda name: f1[name])
    (label, predicted), often = confusions[0]
    return (
        f"Class {best} has the highest F1 score ({f1[best]:.3f}), class {worst} the lowest ({f1[worst]:.3f}). The most "
        f"frequent mistake is label {label} predicted as {predicted} ({count(often)} times)."
    )


def _calibration(sources: Sources) -> str:
    confidence, accuracy = _confidence(sources), served(sources, "accuracy")
    before = served(sources, "expected_calibration_error_uncalibrated")
    after, temperature = (served(sources, key) for key in ("expected_calibration_error", "temperature"))
    return (
        f"Probabilities are calibrated by a temperature of {temperature:.3g}, fitted on the validation split. The "
        f"predicted classes have a mean probability of {percent(confidence, 1)}, and {percent(accuracy, 1)} of the "
        f"predictions are correct: the model is {verdict(sources)}. The expected calibration error is {after:.4f}, and "
        f"{before:.4f} without the temperature."
    )


def _confidence(sources: Sources) -> float:
    """Return the mean probability of the predicted classes, from the bins."""
    table = sources.table("evaluate/calibration")
    counts, values = table.numbers("count"), table.numbers("confidence")
    return sum(number * value for number, value in zip(counts, values, strict=True)) / max(1, sum(counts))


def _per_class(sources: Sources) -> Table:
    table = sources.table("evaluate/per_class")
    columns = [[f"{value:.4f}" for value in table.numbers(name)] for name in ("precision", "recall", "f1")]
    return Table(
        caption="Metrics by class",
        header=("class", "precision", "recall", "F1"),
        rows=list(zip(table.text("class"), *columns, strict=True)),
    )


def _mistakes(sources: Sources) -> Table:
    table = sources.table("evaluate/mistakes")
    likely = [percent(value, 1) for value in table.numbers("probability")]
    losses = [f"{value:.3f}" for value in table.numbers("loss")]
    names = (table.text(name) for name in ("example_id", "label", "predicted"))
    return Table(
        caption="Worst mistakes, the most confident first",
        header=("example", "label", "predicted", "probability", "loss"),
        rows=list(zip(*names, likely, losses, strict=True)),
        folded=True,
    )


def _bins(sources: Sources) -> Table:
    table = sources.table("evaluate/calibration")
    shares = ([percent(value, 1) for value in table.numbers(name)] for name in ("confidence", "accuracy"))
    return Table(
        caption="Calibration by bin",
        header=("confidence", "accuracy", "examples"),
        rows=list(zip(*shares, [count(value) for value in table.numbers("count")], strict=True)),
        folded=True,
    )
