"""`gradtrail runs`: the trainings side by side on a terminal, with what differs between them, the best marked."""

from collections.abc import Iterable, Mapping, Sequence

from mlflow.entities import Run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradtrail.support.errors import UserError
from gradtrail.support.progress import stdout_console
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex

ACCURACY = "eval/accuracy"
_MOST = 1000  # columns, in which no cell is folded
_SHORT = 8  # digits of a run's id
_FIGURES = {  # metric → title, how it is written; where there is little room the last go first
    "train/validation_accuracy": ("validation, %", "{:.2%}"),
    "train/seconds": ("train, s", "{:.1f}"),
    "train/compile_total_seconds": ("compile, s", "{:.1f}"),
    "gradients/noise_scale_typical": ("noise scale", "{:,.0f}"),
}


def print_runs(*, sort_by: str, ascending: bool, where: Mapping[str, str], limit: int | None) -> None:
    """Print the trainings of the store.

    Args:
        sort_by: a metric or param; rows that lack it come last.
        ascending: smallest first.
        where: params, or the data set as `dataset`, with the values that they must have.
        limit: rows at most; None for all.

    Raises:
        UserError: no row has a key; one line.
    """
    trainings = RunIndex(open_store())({"stage": "train"})
    if not trainings:
        print("no training yet: `dvc repro` makes the first")
        return
    chosen = [row for row in trainings if _fits(row, where)]
    if not chosen:
        said = ", ".join(f"{key}={value}" for key, value in where.items())
        raise UserError(f"--where: none of {len(trainings)} trainings has {said}; {_values(trainings, where)}")
    ordered = in_order(chosen, sort_by, ascending=ascending)
    console = stdout_console()
    console.print(fitting_table(ordered[:limit], len(chosen), console))


def in_order(rows: Iterable[Run], sort_by: str, *, ascending: bool) -> list[Run]:
    """Return rows ordered by a metric or param, numbers before words; those that lack it last.

    Raises:
        UserError: all lack it.
    """
    rows = list(rows)
    with_key = [row for row in rows if _value(row, sort_by) is not None]
    if not with_key and sort_by != ACCURACY:  # which no row has before the first evaluation
        known = sorted({name for row in rows for name in (*row.data.metrics, *row.data.params)})
        near = [name for name in known if sort_by.rpartition("/")[2] in name][:5]
        hint = f"; there are {', '.join(near)}" if near else ", such as eval/loss or train.seed"
        raise UserError(f"--sort-by: no row has {sort_by!r}: a metric or a param{hint}")
    with_key.sort(key=lambda row: _rank(_value(row, sort_by)), reverse=not ascending)
    return with_key + [row for row in rows if _value(row, sort_by) is None]


def fitting_table(rows: Sequence[Run], total: int, console: Console) -> Table:
    """Return the table with as many figures as the console has room for."""
    wide = console.options.update(width=_MOST)
    for number in range(len(_FIGURES), -1, -1):
        table = as_table(rows, total=total, num_figures=number)
        if console.measure(table, options=wide).maximum <= console.width:
            break
    return table


def as_table(rows: Sequence[Run], *, total: int, num_figures: int) -> Table:
    """Return the rows as a table: what differs between them, their accuracy, and the first so many other figures.

    Args:
        rows: to be shown.
        total: rows that might have been shown.
        num_figures: columns of figures.
    """
    shown = [name for name in list(_FIGURES)[:num_figures] if any(name in row.data.metrics for row in rows)]
    titles = {name: _FIGURES[name][0] for name in shown}
    differing = _differing(rows)
    is_open = any(row.info.status != "FINISHED" for row in rows)
    title = f"{len(rows)} of {total} trainings"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", no_wrap=True)
    table.add_column("training", overflow="fold")
    for param in differing:
        table.add_column(param.removeprefix("train."), overflow="fold", justify="right")
    table.add_column("test accuracy, %", justify="right", no_wrap=True)
    for figure in titles.values():
        table.add_column(figure, justify="right")
    if is_open:
        table.add_column("status")
    best = max((row.data.metrics[ACCURACY] for row in rows if ACCURACY in row.data.metrics), default=None)
    for row in rows:
        is_best = best is not None and row.data.metrics.get(ACCURACY) == best
        cells = [row.info.run_id[:_SHORT], _title(row), *(row.data.params.get(param, "") for param in differing)]
        cells += [_accuracy(row, is_best=is_best), *(_figure(row, name) for name in titles)]
        table.add_row(*cells, *([row.info.status] if is_open else []), style="bold green" if is_best else None)
    return table


def _differing(rows: Sequence[Run]) -> list[str]:
    """Return the params that are not the same in all rows; those of kinds that a row does not use are left out."""
    names = dict.fromkeys(name for row in rows for name in row.data.params)
    return [name for name in names if len({row.data.params.get(name) for row in rows if _uses(row, name)}) > 1]


def _uses(row: Run, param: str) -> bool:
    """Whether a row's training reads a param: of the blocks of kinds, only the chosen one."""
    section, *rest = param.split(".")
    chosen = {row.data.params.get(f"train.{switch}") for switch in ("model", "optimizer", "schedule", "precision")}
    is_of_kind = section == "train" and len(rest) > 1 and rest[0] in _KINDS
    return not is_of_kind or rest[0] in chosen


_KINDS = {
    *("linear", "mlp", "cnn"),
    *("sgd", "adam", "adamw", "lion", "muon", "schedule_free"),
    *("constant", "cosine", "warmup_cosine", "exponential", "piecewise", "one_cycle"),
}


def _fits(row: Run, where: Mapping[str, str]) -> bool:
    return all(_value(row, key) == value for key, value in where.items())


def _values(rows: Iterable[Run], where: Mapping[str, str]) -> str:
    """Say which values there are of the keys that were asked for."""
    found = {key: sorted({str(value) for row in rows if (value := _value(row, key)) is not None}) for key in where}
    said = {key: f"is {' or '.join(values[:5])}" if values else "is no param" for key, values in found.items()}
    return "; ".join(f"{key} {what}" for key, what in said.items())


def _value(row: Run, key: str) -> str | float | None:
    if key == "dataset":
        return str(row.data.tags.get(key))
    return row.data.metrics.get(key, row.data.params.get(key))


def _rank(value: str | float | None) -> tuple[int, float, str]:
    try:
        return 1, float(value or 0), ""
    except ValueError:
        return 0, 0.0, str(value)


def _title(row: Run) -> str:
    name = str(row.info.run_name)
    experiment = row.data.tags.get("dvc.exp_name")
    return f"{name} ({experiment})" if experiment else name


def _accuracy(row: Run, *, is_best: bool) -> str:
    metrics = row.data.metrics
    if ACCURACY not in metrics:
        return ""
    low, high = (metrics.get(f"{ACCURACY}_{end}") for end in ("low", "high"))
    interval = f" ({low:.2%}–{high:.2%})" if low is not None and high is not None else ""
    return f"{'* ' if is_best else ''}{metrics[ACCURACY]:.2%}{interval}".replace("%", "")


def _figure(row: Run, name: str) -> str:
    return _FIGURES[name][1].format(row.data.metrics[name]).rstrip("%") if name in row.data.metrics else ""
