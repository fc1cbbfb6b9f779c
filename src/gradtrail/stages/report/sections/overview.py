"""The report's first screen: the result, the learning curves, the confusion matrix, calibration, active params."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradtrail.stages.common.active_params import active_params
from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.report.charts import Chart, Series, Stop
from gradtrail.stages.report.components import Tile, count, percent
from gradtrail.stages.report.inputs import CsvTable, Sources
from gradtrail.stages.report.sections.evaluation import CORRECTED, interval, verdict
from gradtrail.stages.report.sections.members import member_tiles, num_members, served
from gradtrail.stages.report.sections.privacy import is_redacted
from gradtrail.stages.report.sections.training import model_name

_LARGEST_MATRIX = 30  # classes; a larger one is a figure
_LEVELS = 9  # shades of a cell
_SMOOTHED, _PLAIN = "training (with label smoothing)", "training (cross-entropy)"
_STYLES = {"training": "train", "validation": "validation"}
_IN_NAME = ("hidden", "channels", "features")  # params that are part of a model's name
_LEFT_OUT = {"model", "keep_epochs", "secret_sha256", "sampling", *_IN_NAME}
_SWITCHES = {"augmentation", "privacy"}  # blocks whose params are shown if they are not 0, false or null
_OFF = {  # params that are shown only if they have another value
    "members": 1,
    "vary": ["initialization", "order", "augmentation", "dropout"],
    "accumulation_steps": 1,
    "augmentation_multiplicity": 1,
    "shards": 1,
    "average_decay": None,
    "patience": None,
    "remat": False,
    "label_noise": 0,
    "corrections": False,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the confusion matrix; its `level` is 0 on the diagonal and elsewhere says how dark it is."""

    label: int
    predicted: int
    number: int
    level: int


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The content of the first screen; without a matrix if there are too many classes."""

    tiles: Sequence[Tile]
    charts: Sequence[Chart]
    calibration: Chart
    matrix: Sequence[Sequence[Cell]]
    params: Mapping[str, str]


def make_overview(sources: Sources) -> Overview:
    """Return the first screen."""
    return Overview(
        tiles=_tiles(sources) if num_members(sources) == 1 else member_tiles(sources),
        charts=(_loss(sources), _error(sources)),
        calibration=_calibration(sources),
        matrix=_matrix(sources),
        params=params_with_effect(sources),
    )


def params_with_effect(sources: Sources) -> dict[str, str]:
    """Return the params that had an effect on the training, name → value.

    Switches that are off are left out. An ambiguous name begins with that of its block.
    """
    kinds = [sources.param(f"train.{name}") for name in ("model", "optimizer", "schedule")]
    data = {f"preprocess.{name}": sources.param(f"preprocess.{name}") for name in ("label_noise", "corrections")}
    params = {"model": model_name(sources)}
    for key, value in active_params(flatten({"train": sources.params["train"]}) | data).items():
        _, *block, name = key.split(".")
        is_off = (not value and _SWITCHES.issuperset(block) and block) or (name in _OFF and value == _OFF[name])
        if not is_off and name not in _LEFT_OUT:
            params[name if not block or (block[0] in kinds and name not in params) else f"{block[0]}: {name}"] = value
    return {name.replace("_", " "): _format_param(value) for name, value in params.items()}


def _format_param(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _tiles(sources: Sources) -> list[Tile]:
    """Return six tiles, which fill the row: the accuracy by corrected labels replaces the model's size."""
    is_corrected = CORRECTED in sources.metrics["evaluate"]
    raw = sources.metric("evaluate", "expected_calibration_error_uncalibrated")
    wrong, total = (count(sources.metric("evaluate", key)) for key in ("num_mistakes", "num_examples"))
    return [
        Tile(
            name="Test accuracy",
            value=percent(sources.metric("evaluate", "accuracy")),
            note=f"{interval(sources)} (95% interval)",
        ),
        *([_corrected(sources)] if is_corrected else []),
        Tile(name="Test loss", value=f"{sources.metric('evaluate', 'loss'):.4f}", note="nats per example, calibrated"),
        Tile(name="Mistakes", value=wrong, note=f"of {total} test examples"),
        Tile(
            name="Calibration error",
            value=f"{sources.metric('evaluate', 'expected_calibration_error'):.4f}",
            note=f"uncalibrated: {raw:.4f}",
        ),
        Tile(
            name="Best validation accuracy",
            value=percent(sources.metric("train", "best_validation_accuracy")),
            note=f"epoch {sources.metric('train', 'best_epoch'):g}; last epoch "
            f"{percent(sources.metric('train', 'validation_accuracy'))}",
        ),
        *([] if is_corrected else [_size(sources)]),
    ]


def _corrected(sources: Sources) -> Tile:
    return Tile(
        name="Accuracy, corrected labels",
        value=percent(sources.metric("evaluate", CORRECTED)),
        note=interval(sources, CORRECTED),
    )


def _size(sources: Sources) -> Tile:
    return Tile(name="Parameters", value=count(sources.metric("train", "num_parameters")), note=model_name(sources))


def _loss(sources: Sources) -> Chart:
    table = sources.table("train/epochs")
    curves = {} if is_redacted(sources) else {"train": ("training", table.numbers("cross_entropy"))}
    if curves and sources.param("train.label_smoothing"):
        curves = {"train": (_PLAIN, table.numbers("cross_entropy")), "smoothed": (_SMOOTHED, table.numbers("loss"))}
    curves["validation"] = ("validation", table.numbers("validation_loss"))
    course = ", ".join(f"{name} {values[0]:.3g} to {values[-1]:.3g}" for name, values in curves.values() if values)
    return _epoch_chart(
        table,
        {name: (style, values) for style, (name, values) in curves.items()},
        form="{:.4f}",
        id="loss",
        title="Loss, nats per example",
        alt=f"Loss in nats per example by epoch: {course or 'there was no epoch'}.{_banded(table)}",
        bands={"validation": _ends(table, "validation_loss")},
    )


def _error(sources: Sources) -> Chart:
    table = sources.table("train/epochs")
    names = {"training": "accuracy", "validation": "validation_accuracy"}
    if is_redacted(sources):
        del names["training"]
    curves = {split: [100 * (1 - value) for value in table.numbers(name)] for split, name in names.items()}
    validation = curves["validation"]
    ends = f"{validation[0]:.2f}% to {validation[-1]:.2f}%" if validation else "there was no epoch"
    return _epoch_chart(
        table,
        {split: (_STYLES[split], values) for split, values in curves.items()},
        form="{:.2f}%",
        id="error",
        title="Error",
        alt=f"Share of misclassified examples by epoch; validation: {ends}.{_banded(table)}",
        bands={"validation": [(x, 100 * (1 - y), 100 * (1 - z)) for x, z, y in _ends(table, "validation_accuracy")]},
        unit="%",
        log=min(itertools.chain(*curves.values()), default=0) > 0,
    )


def _ends(table: CsvTable, column: str) -> list[tuple[float, float, float]]:
    """Return (epoch, low, high) of a mean over members, for epochs with at least two members."""
    if not any(row.get(f"{column}_low") for row in table.rows):
        return []
    banded = CsvTable(rows=[row for row in table.rows if row.get(f"{column}_low")])
    return list(zip(*(banded.numbers(name) for name in ("epoch", f"{column}_low", f"{column}_high")), strict=True))


def _banded(table: CsvTable) -> str:
    return " Means over the seeds; the band is the 95% interval." if _ends(table, "validation_loss") else ""


def _epoch_chart(
    table: CsvTable,
    curves: Mapping[str, tuple[str, list[float]]],
    *,
    form: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]],
    **options: Any,
) -> Chart:
    epochs = table.numbers("epoch")
    columns = [[f"{name}: {form.format(value)}" for value in values] for name, (_, values) in curves.items()]
    return Chart(
        x_label="epoch",
        series=[
            Series(name=name, style=style, points=list(zip(epochs, values, strict=True)), band=bands.get(name, ()))
            for name, (style, values) in curves.items()
        ],
        stops=[
            Stop(x=epoch, lines=[f"epoch {epoch:g}", *lines]) for epoch, *lines in zip(epochs, *columns, strict=True)
        ],
        **options,
    )


def _calibration(sources: Sources) -> Chart:
    names = {"calibrated": "calibration", "uncalibrated": "calibration_uncalibrated"}
    tables = {name: sources.table(f"evaluate/{table}") for name, table in names.items()}
    columns = {
        name: list(zip(*(table.numbers(column) for column in ("confidence", "accuracy", "count")), strict=True))
        for name, table in tables.items()
    }
    stops = [
        Stop(
            x=x, lines=[name, f"confidence: {percent(x, 1)}", f"accuracy: {percent(y, 1)}", f"examples: {count(size)}"]
        )
        for name, rows in columns.items()
        for x, y, size in rows
    ]
    bins, most = (
        int(sources.param("evaluate.calibration_bins")),
        max((size for *_, size in columns["calibrated"]), default=1),
    )
    before, after = (served(sources, f"expected_calibration_error{end}") for end in ("_uncalibrated", ""))
    return Chart(
        id="calibration",
        title="Calibration",
        alt=(
            f"Reliability diagram: accuracy over confidence in {bins} bins. The expected calibration error is "
            f"{after:.4f}, before temperature scaling {before:.4f}; the model is {verdict(sources)}."
        ),
        x_label="confidence (probability of the predicted class)",
        square=True,
        series=[
            Series(name=name, style=style, points=[(x, y) for x, y, _ in columns[name]])
            for name, style in (("calibrated", "model"), ("uncalibrated", "uncalibrated"))
        ],
        bar_width=0.9 / bins,
        bars_name="examples (log scale)",
        bars=[
            ((min(math.floor(x * bins), bins - 1) + 0.5) / bins, math.log1p(size) / math.log1p(most))
            for x, _, size in columns["calibrated"]
        ],
        stops=sorted(stops, key=lambda stop: stop.x),
    )


def _matrix(sources: Sources) -> list[list[Cell]]:
    classes = sources.info.num_classes
    if classes > _LARGEST_MATRIX:
        return []
    table = sources.predictions
    counts = Counter(zip(table["label"].tolist(), table["predicted"].tolist(), strict=True))
    most = max((number for (label, predicted), number in counts.items() if label != predicted), default=1)
    return [
        [
            Cell(
                label=label,
                predicted=predicted,
                number=counts[label, predicted],
                level=0 if label == predicted else math.ceil(_LEVELS * math.sqrt(counts[label, predicted] / most)),
            )
            for predicted in range(classes)
        ]
        for label in range(classes)
    ]
