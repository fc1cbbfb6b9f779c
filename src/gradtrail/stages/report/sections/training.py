"""The report's sections on the data and the training, from params, metrics and tables alone."""

from gradtrail.core import names
from gradtrail.stages.datasets.catalog import title
from gradtrail.stages.report.components import Figure, Section, Table, count, percent, size
from gradtrail.stages.report.inputs import Sources
from gradtrail.stages.report.sections.privacy import is_redacted, warning

SPLITS = ("train", "validation", "test")


def model_name(sources: Sources) -> str:
    """Return the name of the model by its kind and widths, such as `mlp-256-128`."""
    kind = sources.param("train.model")
    section = sources.params["train"].get(kind) or {}
    widths = {key: section.get(key, ()) for key in ("channels", "hidden")}
    return names.model_name(kind, **widths, features=sources.param("train.features"))


def dataset_name(sources: Sources) -> str:
    """Return the title of the data set, such as `MNIST`."""
    return title(sources.info.name)


def data_section(sources: Sources) -> Section:
    """Describe the data set, its splits and its label noise."""
    sizes = {split: sources.metric("preprocess", f"{split}_examples") for split in SPLITS}
    total = sum(sizes.values())
    rows = [(split, count(number), percent(number / total, 1)) for split, number in sizes.items()]
    return Section(
        id="data",
        title="Data",
        summary=_summary(sources, sizes),
        text=(_origin(sources), _splits(sources, sizes), _labels(sources, sizes["train"])),
        tables=(Table(caption="Examples by split", header=("split", "examples", "share"), rows=rows),),
        figures=() if is_redacted(sources) else (_samples(sources),),
        warning=warning(sources),
    )


def training_section(sources: Sources) -> Section:
    """Describe the model, how it was trained, and its training and validation metrics."""
    return Section(
        id="training",
        title="Training",
        text=(_how(sources), _outcome(sources)),
        tables=(_epochs(sources), _parameters(sources)),
        figures=(_steps(sources),),
        warning=warning(sources),
    )


def _summary(sources: Sources, sizes: dict[str, float]) -> str:
    height, width = sources.info.image_shape
    parts = ", ".join(f"{count(number)} {split}" for split, number in sizes.items())
    return (
        f"{dataset_name(sources)}: images of {height}\u00a0×\u00a0{width} pixels in {sources.info.num_classes} "
        f"classes; {parts} examples. {_labels(sources, sizes['train'])}"
    )


def _origin(sources: Sources) -> str:
    height, width = sources.info.image_shape
    train, test = (sources.metric("fetch", f"{part}_examples") for part in ("train", "test"))
    return (
        f"The data set {sources.info.label} has {count(train)} training images and {count(test)} test images of "
        f"{height}\u00a0×\u00a0{width} pixels in {sources.info.num_classes} classes "
        f"({size(sources.metric('fetch', 'bytes'))})."
    )


def _splits(sources: Sources, sizes: dict[str, float]) -> str:
    fraction = float(sources.param("preprocess.subset_fraction"))
    used = "All examples are used" if fraction == 1 else f"{percent(fraction, 1)} of each split is used"
    counted = (
        f"{used}: {count(sizes['train'])} for training, {count(sizes['validation'])} for validation and "
        f"{count(sizes['test'])} for testing."
    )
    if is_redacted(sources):
        return counted
    return (
        f"{counted} On a scale from 0 to 1 the pixels of the training split have a mean of "
        f"{sources.metric('preprocess', 'pixel_mean'):.3f} and a standard deviation of "
        f"{sources.metric('preprocess', 'pixel_std'):.3f}."
    )


def _labels(sources: Sources, num_train: float) -> str:
    if is_redacted(sources):
        return "How many labels were changed is left out: it would be counted without noise."
    planted = round(float(sources.param("preprocess.label_noise")) * num_train)
    noise = "No label noise was added."
    if planted:
        noise = f"Label noise changed {count(planted)} of the training labels ({percent(planted / num_train, 1)})."
    if not sources.param("preprocess.corrections"):
        return noise
    corrected = [f"{count(sources.metric('preprocess', f'{split}_corrected_labels'))} {split}" for split in SPLITS]
    left = f"; {count(sources.metric('preprocess', 'noisy_labels'))} that noise changed are still wrong"
    if sources.param("preprocess.corrections") == "test":
        return f"{noise} Corrections of {corrected[-1]} labels count for the second accuracy alone."
    return f"{noise} Corrections were applied to {', '.join(corrected)} labels{left if planted else ''}."


def _samples(sources: Sources) -> Figure:
    classes = sources.info.num_classes
    train = count(sources.metric("preprocess", "train_examples"))
    return Figure(
        png=sources.figure("preprocess/samples"),
        caption="Training examples, one row per label",
        alt=f"The first of {train} training images, in {classes} rows: one row per label from 0 to {classes - 1}.",
    )


def _how(sources: Sources) -> str:
    name, number = model_name(sources), count(sources.metric("train", "num_parameters"))
    epochs, steps = sources.metric("train", "epochs"), sources.metric("train", "steps")
    planned = sources.metric("train", "planned_steps")
    early = "" if steps == planned else f" of {count(planned)} planned"
    return (
        f"{name}, a model with {number} parameters, was trained for {_epochs_of(epochs)} ({count(steps)}{early} steps) "
        f"with batch size {sources.param('train.batch_size')}, optimizer {sources.param('train.optimizer')}, learning "
        f"rate schedule {sources.param('train.schedule')} and precision {sources.param('train.precision')}."
        f"{_seeds(sources)}"
    )


def _seeds(sources: Sources) -> str:
    number = int(sources.param("train.members"))
    first = int(sources.param("train.seed"))
    if number == 1:
        return ""
    return (
        f" This was done with each of the {number} seeds {first} to {first + number - 1}; metrics are means over them, "
        f"and the steps shown are those of seed {first}."
    )


def _outcome(sources: Sources) -> str:
    held_out = sources.metric("train", "validation_accuracy")
    best, epoch = sources.metric("train", "best_validation_accuracy"), sources.metric("train", "best_epoch")
    when = f"in epoch {epoch:g}" if float(epoch).is_integer() else f"on average in epoch {epoch:.1f}"
    reached = f"The validation accuracy at the end of the last epoch is {percent(held_out)}."
    if not is_redacted(sources):
        accuracy = sources.metric("train", "accuracy")
        gap = 100 * (accuracy - held_out)
        verdict = f"{abs(gap):.1f} percentage points {'above' if gap >= 0 else 'below'}"
        reached = (
            f"The training accuracy over the last epoch is {percent(accuracy)}, {verdict} the validation accuracy at "
            f"its end, {percent(held_out)}."
        )
    return (
        f"{reached} The best validation accuracy, {percent(best)}, was reached {when}. The "
        f"final validation loss is {sources.metric('train', 'validation_loss'):.3g} nats per example."
    )


def _steps(sources: Sources) -> Figure:
    clip = sources.param("train.clip_norm")
    clipped = "" if clip is None else f", with a line at the clipping threshold {clip}"
    columns = "Gradient norm" if is_redacted(sources) else "Loss, gradient norm"
    return Figure(
        png=sources.figure("train/steps"),
        caption="Metrics of each optimizer step; the darker line is the running mean",
        alt=f"{columns} and learning rate over {count(sources.metric('train', 'steps'))} optimizer steps{clipped}.",
    )


def _epochs(sources: Sources) -> Table:
    table = sources.table("train/epochs")
    kinds = {
        "cross_entropy": ("training cross-entropy", "{:.4f}"),
        "loss": ("training loss with label smoothing", "{:.4f}"),
        "accuracy": ("training accuracy", "{:.2%}"),
        "validation_loss": ("validation loss", "{:.4f}"),
        "validation_accuracy": ("validation accuracy", "{:.2%}"),
    }
    if not sources.param("train.label_smoothing"):
        del kinds["loss"]  # the same
    if is_redacted(sources):
        kinds = {name: kind for name, kind in kinds.items() if name.startswith("validation")}
    columns = [[form.format(value) for value in table.numbers(name)] for name, (_, form) in kinds.items()]
    return Table(
        caption="Metrics by epoch",
        header=("epoch", *(title for title, _ in kinds.values())),
        rows=list(zip(table.text("epoch"), *columns, strict=True)),
    )


def _parameters(sources: Sources) -> Table:
    table = sources.table("train/parameters")
    numbers = [count(number) for number in table.numbers("number")]
    return Table(
        caption="Parameters by array",
        header=("array", "shape", "parameters"),
        rows=list(zip(table.text("parameter"), table.text("shape"), numbers, strict=True)),
        folded=True,
    )


def _epochs_of(number: float) -> str:
    return "one epoch" if number == 1 else f"{number:g} epochs"
