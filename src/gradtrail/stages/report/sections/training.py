"""What the report says of the data and of the training: sentences, tables and pictures, from the figures alone."""

from gradtrail.core.common import names
from gradtrail.stages.report.components import Picture, Section, Table, count, percent, size
from gradtrail.stages.report.inputs import Sources

SPLITS = ("train", "validation", "test")


def model_name(sources: Sources) -> str:
    """Return the name of the network that was trained, such as `mlp-256-128`."""
    kind = sources.param("train.model")
    section = sources.params["train"].get(kind) or {}
    return names.model_name(kind, channels=section.get("channels", ()), hidden=section.get("hidden", ()))


def data_section(sources: Sources) -> Section:
    """Say which examples there are, how they are split, and whether their labels are as they were."""
    sizes = {split: sources.figure("preprocess", f"{split}_examples") for split in SPLITS}
    total = sum(sizes.values())
    rows = [(split, count(number), percent(number / total, 1)) for split, number in sizes.items()]
    return Section(
        id="data",
        title="Data",
        text=(_origin(sources), _splits(sources, sizes), _labels(sources, sizes["train"])),
        tables=(Table(caption="Examples of each split", header=("split", "examples", "of all"), rows=rows),),
        pictures=(_samples(sources), _balance(sources)),
    )


def training_section(sources: Sources) -> Section:
    """Say what was trained, how, and where that led."""
    return Section(
        id="training",
        title="Training",
        text=(_how(sources), _where_to(sources)),
        tables=(_epochs(sources), _parameters(sources)),
        pictures=(_curves(sources), _steps(sources)),
    )


def _origin(sources: Sources) -> str:
    height, width = sources.info.image_shape
    train, test = (sources.figure("fetch", f"{part}_examples") for part in ("train", "test"))
    return (
        f"The data set is {sources.info.name}: {count(train)} images to train with and {count(test)} to test with, of "
        f"{height} × {width} pixels in {sources.info.num_classes} classes, {size(sources.figure('fetch', 'bytes'))} "
        "in all."
    )


def _splits(sources: Sources, sizes: dict[str, float]) -> str:
    fraction = float(sources.param("preprocess.subset_fraction"))
    used = "All of them are used" if fraction == 1 else f"Of each split {percent(fraction, 1)} is used"
    return (
        f"{used}: {count(sizes['train'])} train the network, {count(sizes['validation'])} are held out to validate it, "
        f"and {count(sizes['test'])} are kept for the test alone. The mean of a training pixel is "
        f"{sources.figure('preprocess', 'pixel_mean'):.3f}, on a scale from 0 to 1, its standard deviation "
        f"{sources.figure('preprocess', 'pixel_std'):.3f}."
    )


def _labels(sources: Sources, num_train: float) -> str:
    noisy = sources.figure("preprocess", "noisy_labels")
    if noisy == 0:
        return "Every label is the one that the data set gives."
    return f"{count(noisy)} of the training labels, {percent(noisy / num_train, 1)}, were made wrong on purpose."


def _samples(sources: Sources) -> Picture:
    classes = sources.info.num_classes
    train = count(sources.figure("preprocess", "train_examples"))
    return Picture(
        png=sources.picture("preprocess/samples"),
        caption="Training examples, a row for each label",
        alt=f"The first of {train} training images, in {classes} rows: a row for each label from 0 to {classes - 1}.",
    )


def _balance(sources: Sources) -> Picture:
    labels = sources.table("evaluate/classes").text("label")
    shares = {
        label: labels.count(label) / len(labels) for label in sorted(set(labels), key=lambda each: (len(each), each))
    }
    most, least = max(shares, key=lambda label: shares[label]), min(shares, key=lambda label: shares[label])
    return Picture(
        png=sources.picture("preprocess/class_balance"),
        caption="Share of each class in each split",
        alt=(
            f"Bars of the share that each class has in the training, validation and test split. In the test split they "
            f"reach from {percent(shares[least], 1)} for class {least} to {percent(shares[most], 1)} for class {most}."
        ),
    )


def _how(sources: Sources) -> str:
    name, number = model_name(sources), count(sources.figure("train", "num_parameters"))
    epochs, steps = sources.figure("train", "epochs"), sources.figure("train", "steps")
    planned = sources.figure("train", "planned_steps")
    early = "" if steps == planned else f", of {count(planned)} that were planned"
    return (
        f"{name}, a network of {number} parameters, was trained for {_epochs_of(epochs)}, {count(steps)} steps{early}, "
        f"in batches of {sources.param('train.batch_size')}, by {sources.param('train.optimizer')} with the schedule "
        f"{sources.param('train.schedule')}, in {sources.param('train.precision')}."
    )


def _where_to(sources: Sources) -> str:
    accuracy, held_out = sources.figure("train", "accuracy"), sources.figure("train", "validation_accuracy")
    best, epoch = sources.figure("train", "best_validation_accuracy"), sources.figure("train", "best_epoch")
    gap = 100 * (accuracy - held_out)
    verdict = f"{abs(gap):.1f} points {'more' if gap >= 0 else 'less'} than on the validation split"
    return (
        f"In the last epoch {percent(accuracy)} of the training examples were right, {verdict}, of which "
        f"{percent(held_out)} were right at its end. The best validation accuracy, {percent(best)}, is that of epoch "
        f"{epoch:g}. The loss of a validation example is {sources.figure('train', 'validation_loss'):.3g} nats on "
        "average."
    )


def _curves(sources: Sources) -> Picture:
    table = sources.table("train/epochs")
    smoothing = float(sources.param("train.label_smoothing"))
    smoothed = f", with a label smoothing of {smoothing:g}," if smoothing else ""
    loss, accuracy = table.numbers("loss"), table.numbers("validation_accuracy")
    course = (
        f"From the first epoch to the last the training loss{smoothed} goes from {loss[0]:.3g} to {loss[-1]:.3g} nats, "
        f"the validation error from {percent(1 - accuracy[0])} to {percent(1 - accuracy[-1])}."
        if loss and accuracy
        else "There was no epoch."
    )
    return Picture(
        png=sources.picture("train/learning_curves"),
        caption="Loss and error by epoch",
        alt=f"Two panels with a curve each for the training and the validation split. {course}",
    )


def _steps(sources: Sources) -> Picture:
    clip = sources.param("train.clip_norm")
    clipped = "" if clip is None else f", with a line at {clip}, to which the norm is clipped"
    return Picture(
        png=sources.picture("train/steps"),
        caption="Step by step: faintly each step, in full colour the running mean",
        alt=(
            f"Loss, gradient norm and learning rate over {count(sources.figure('train', 'steps'))} optimizer "
            f"steps{clipped}."
        ),
    )


def _epochs(sources: Sources) -> Table:
    table = sources.table("train/epochs")
    kinds = {"loss": "{:.4f}", "accuracy": "{:.2%}", "validation_loss": "{:.4f}", "validation_accuracy": "{:.2%}"}
    columns = [[form.format(value) for value in table.numbers(name)] for name, form in kinds.items()]
    return Table(
        caption="Epoch by epoch",
        header=("epoch", "training loss", "training accuracy", "validation loss", "validation accuracy"),
        rows=list(zip(table.text("epoch"), *columns, strict=True)),
    )


def _parameters(sources: Sources) -> Table:
    table = sources.table("train/parameters")
    numbers = [count(number) for number in table.numbers("number")]
    return Table(
        caption="Parameters, array by array",
        header=("array", "shape", "numbers"),
        rows=list(zip(table.text("parameter"), table.text("shape"), numbers, strict=True)),
        folded=True,
    )


def _epochs_of(number: float) -> str:
    return "one epoch" if number == 1 else f"{number:g} epochs"
