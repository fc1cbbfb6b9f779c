"""What the report says of the evaluation on the test split: sentences, tables and pictures, from the figures alone."""

from collections import Counter

from gradtrail.stages.report.components import Picture, Section, Table, count, percent
from gradtrail.stages.report.inputs import Sources

_CONFUSIONS = 10  # that the page lists
_WELL_CALIBRATED = 0.005  # difference of confidence and accuracy that is none to speak of


def evaluation_section(sources: Sources) -> Section:
    """Say how good the predictions are, which classes are hard, and how far probabilities can be trusted."""
    confusions = confused(sources)
    return Section(
        id="evaluation",
        title="Evaluation",
        text=(_how_good(sources), _classes(sources, confusions), _calibration(sources)),
        tables=(
            _per_class(sources),
            Table(
                caption="Most frequent mistakes",
                header=("label", "predicted", "examples"),
                rows=[(label, predicted, count(number)) for (label, predicted), number in confusions[:_CONFUSIONS]],
            ),
            _mistakes(sources),
            _bins(sources),
        ),
        pictures=_pictures(sources, confusions),
    )


def confused(sources: Sources) -> list[tuple[tuple[str, str], int]]:
    """Return (label, predicted) → how often, of the wrong predictions, the most frequent first."""
    table = sources.table("evaluate/classes")
    pairs = Counter(
        pair for pair in zip(table.text("label"), table.text("predicted"), strict=True) if len(set(pair)) > 1
    )
    return sorted(pairs.items(), key=lambda item: (-item[1], item[0]))


def interval(sources: Sources) -> str:
    """Return the interval of the test accuracy, such as `98.34% to 98.80%`."""
    return " to ".join(percent(sources.figure("evaluate", f"accuracy_{end}")) for end in ("low", "high"))


def _how_good(sources: Sources) -> str:
    total, wrong = sources.figure("evaluate", "num_examples"), sources.figure("evaluate", "num_mistakes")
    return (
        f"Of {count(total)} test examples {count(total - wrong)} are classified rightly, "
        f"{percent(sources.figure('evaluate', 'accuracy'))} (95% interval: {interval(sources)}), and "
        f"{count(wrong)} wrongly, by the {sources.param('evaluate.weights')} weights, those of epoch "
        f"{sources.figure('evaluate', 'epoch'):g}. The loss of an example is "
        f"{sources.figure('evaluate', 'loss'):.3g} nats on average."
    )


def _classes(sources: Sources, confusions: list[tuple[tuple[str, str], int]]) -> str:
    table = sources.table("evaluate/per_class")
    f1 = dict(zip(table.text("class"), table.numbers("f1"), strict=True))
    if not f1 or not confusions:
        return "No mistake was made, in any class."
    worst, best = min(f1, key=lambda name: f1[name]), max(f1, key=lambda name: f1[name])
    (label, predicted), often = confusions[0]
    return (
        f"Class {best} is recognized best (F1 {f1[best]:.3f}), class {worst} worst ({f1[worst]:.3f}). The most "
        f"frequent mistake is a {label} that is taken for a {predicted}, {count(often)} times."
    )


def _calibration(sources: Sources) -> str:
    confidence, accuracy = _confidence(sources), sources.figure("evaluate", "accuracy")
    gap = confidence - accuracy
    verdict = (
        "they can be taken as they are"
        if abs(gap) < _WELL_CALIBRATED
        else "they promise too much"
        if gap > 0
        else "they promise less than they hold"
    )
    return (
        f"The probabilities of the predicted classes are {percent(confidence, 1)} on average, and "
        f"{percent(accuracy, 1)} of the predictions are right: {verdict}. The expected calibration error is "
        f"{sources.figure('evaluate', 'expected_calibration_error'):.4f}."
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
        caption="Class by class",
        header=("class", "precision", "recall", "F1"),
        rows=list(zip(table.text("class"), *columns, strict=True)),
    )


def _mistakes(sources: Sources) -> Table:
    table = sources.table("evaluate/mistakes")
    likely = [percent(value, 1) for value in table.numbers("probability")]
    losses = [f"{value:.3f}" for value in table.numbers("loss")]
    names = (table.text(name) for name in ("example_id", "label", "predicted"))
    return Table(
        caption="Worst mistakes, the most certain first",
        header=("example", "label", "predicted", "probability", "loss"),
        rows=list(zip(*names, likely, losses, strict=True)),
        folded=True,
    )


def _bins(sources: Sources) -> Table:
    table = sources.table("evaluate/calibration")
    shares = ([percent(value, 1) for value in table.numbers(name)] for name in ("confidence", "accuracy"))
    return Table(
        caption="Calibration, bin by bin",
        header=("mean probability", "right", "examples"),
        rows=list(zip(*shares, [count(value) for value in table.numbers("count")], strict=True)),
        folded=True,
    )


def _pictures(sources: Sources, confusions: list[tuple[tuple[str, str], int]]) -> tuple[Picture, ...]:
    wrong = count(sources.figure("evaluate", "num_mistakes"))
    often = ", ".join(
        f"{count(number)} times a {label} taken for a {other}" for (label, other), number in confusions[:3]
    )
    worst = sources.table("evaluate/mistakes")
    first = list(zip(*(worst.text(name) for name in ("example_id", "label", "predicted")), strict=True))[:1]
    named = "".join(f" The first is #{example}, a {label} taken for a {other}." for example, label, other in first)
    error = sources.figure("evaluate", "expected_calibration_error")
    return (
        Picture(
            png=sources.picture("evaluate/confusion"),
            caption="Confusion matrix: right answers stand on the diagonal, without colour",
            alt=f"A matrix of labels and predictions, with {wrong} mistakes off its diagonal: {often or 'none'}.",
        ),
        Picture(
            png=sources.picture("evaluate/reliability"),
            caption="Calibration: above the dashed line more is right than the probabilities promise",
            alt=(
                f"Accuracy over probability beside the diagonal of perfect calibration, from which it lies {error:.4f} "
                f"away on average; below, how many examples each of {len(sources.table('evaluate/calibration').rows)} "
                "bins holds."
            ),
        ),
        Picture(
            png=sources.picture("evaluate/mistakes"),
            caption="Worst mistakes: label → prediction, and how probable that was",
            alt=f"Images of the {len(worst.rows)} most certain mistakes with label, prediction and probability.{named}",
        ),
    )
