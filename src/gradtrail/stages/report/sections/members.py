"""The parts of the report on several members: each of them, their mean, and their ensemble."""

from gradtrail.stages.report.components import Table, Tile, count, percent
from gradtrail.stages.report.inputs import Sources
from gradtrail.stages.report.sections.training import model_name

_TABLE = "evaluate/members"
_COLUMNS = {  # column of the table of members → its title and form
    "accuracy": ("test accuracy", "{:.2%}"),
    "loss": ("test loss", "{:.4f}"),
    "expected_calibration_error": ("calibration error", "{:.4f}"),
    "temperature": ("temperature", "{:.3g}"),
}


def num_members(sources: Sources) -> int:
    """Return the number of networks of the training."""
    return int(sources.metric("evaluate", "members")) if "members" in sources.metrics["evaluate"] else 1


def served(sources: Sources, key: str) -> float:
    """Return a metric of the evaluation of what is served: the network, or the ensemble of several."""
    return sources.metric("evaluate", key if num_members(sources) == 1 else f"ensemble_{key}")


def _sd(sources: Sources, stage: str, key: str, form: str) -> str:
    """Return the standard deviation of a metric over the members, such as `± 0.09% (sd)`."""
    return f"± {form} (sd)".format(sources.metric(stage, f"{key}_sd"))


def member_tiles(sources: Sources) -> list[Tile]:
    """Return the headline metrics: means over the members, and those of their ensemble, which is served."""
    number = num_members(sources)
    low, high = (percent(served(sources, f"accuracy_{end}")) for end in ("low", "high"))
    return [
        Tile(
            name="Test accuracy",
            value=percent(sources.metric("evaluate", "accuracy")),
            note=f"{_sd(sources, 'evaluate', 'accuracy', '{:.2%}')}, mean over {number} seeds",
        ),
        Tile(
            name="Accuracy of the ensemble",
            value=percent(served(sources, "accuracy")),
            note=f"{low} to {high} (95% interval)",
        ),
        Tile(
            name="Test loss of the ensemble",
            value=f"{served(sources, 'loss'):.4f}",
            note=f"nats; of one network {sources.metric('evaluate', 'loss'):.4f} "
            f"{_sd(sources, 'evaluate', 'loss', '{:.4f}')}",
        ),
        Tile(
            name="Calibration error",
            value=f"{served(sources, 'expected_calibration_error'):.4f}",
            note=f"of the ensemble; uncalibrated: {served(sources, 'expected_calibration_error_uncalibrated'):.4f}",
        ),
        Tile(
            name="Validation accuracy",
            value=percent(sources.metric("train", "validation_accuracy")),
            note=f"{_sd(sources, 'train', 'validation_accuracy', '{:.2%}')}; best epochs "
            f"{percent(sources.metric('train', 'best_validation_accuracy'))}",
        ),
        Tile(
            name="Parameters",
            value=count(sources.metric("train", "num_parameters")),
            note=f"{model_name(sources)}, each of {number}",
        ),
    ]


def how_good(sources: Sources) -> str:
    """Return sentences on the accuracy of the ensemble and of its members."""
    number, total = num_members(sources), sources.metric("evaluate", "num_examples")
    right = total * served(sources, "accuracy")
    low, high = (percent(served(sources, f"accuracy_{end}")) for end in ("low", "high"))
    alone = f"{percent(sources.metric('evaluate', 'accuracy'))} {_sd(sources, 'evaluate', 'accuracy', '{:.2%}')}"
    ends = " to ".join(percent(sources.metric("evaluate", f"accuracy_{end}")) for end in ("low", "high"))
    return (
        f"The {number} networks have the {sources.param('evaluate.weights')} weights of trainings that differ in their "
        "seeds. What is served is their ensemble, the mean of their probabilities; tables, figures and examples on "
        f"this page are its own. It classifies {count(right)} of {count(total)} test examples correctly: an accuracy "
        f"of {percent(served(sources, 'accuracy'))} (95% interval: {low} to {high}), with a test loss of "
        f"{served(sources, 'loss'):.3g} nats per example. The networks by themselves have a mean accuracy of {alone}; "
        f"the 95% interval of that mean over seeds is {ends}."
    )


def member_tables(sources: Sources) -> tuple[Table, ...]:
    """Return a table with a row for each member and one for the ensemble; none if there is a single member."""
    if num_members(sources) == 1:
        return ()
    table = sources.table(_TABLE)
    columns = [[form.format(value) for value in table.numbers(name)] for name, (_, form) in _COLUMNS.items()]
    pooled = ("ensemble", *(form.format(served(sources, name)) for name, (_, form) in _COLUMNS.items()))
    return (
        Table(
            caption="Members of the ensemble",
            header=("seed", *(title for title, _ in _COLUMNS.values())),
            rows=[*zip(table.text("seed"), *columns, strict=True), pooled],
            folded=True,
        ),
    )
