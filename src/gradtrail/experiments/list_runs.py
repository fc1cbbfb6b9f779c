"""`gradtrail runs`: a table of the training runs, the params in which they differ, and the best one."""

from collections.abc import Iterable, Mapping, Sequence

from mlflow.entities import Run
from rich.console import Console
from rich.table import Table

from gradtrail.stages.common.params import MEMBERS, SEED, active_params
from gradtrail.support.errors import UserError, suggestion
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import table
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import RunIndex

ACCURACY = "eval/accuracy"
_ACCURACY_COLUMN = "test accuracy, %"
_UNLIMITED = 1000  # width in columns at which no cell is folded
_SHORT = 8  # digits of a run's id
_METRICS = {  # metric → title and format; on a narrow terminal the last ones are left out first
    "train/validation_accuracy": ("validation, %", "{:.2%}"),
    "train/seconds": ("train, s", "{:.1f}"),
    "train/compile_total_seconds": ("compile, s", "{:.1f}"),
    "gradients/noise_scale_typical": ("noise scale", "{:,.0f}"),
}


def print_runs(*, sort_by: str, ascending: bool, where: Mapping[str, str], limit: int | None) -> None:
    """Print the training runs in the store.

    Args:
        sort_by: Metric or param; runs without it come last.
        ascending: True for the smallest first.
        where: Required values of params, or of the data set as `dataset`.
        limit: Maximum number of runs; None for all.

    Raises:
        UserError: No run has a key or a value.
    """
    training_runs = RunIndex(open_store())({"stage": "train"})
    if not training_runs:
        print("no training runs yet; `gradtrail repro` makes the first")
        return
    chosen = [run for run in training_runs if _fits(run, where)]
    if not chosen:
        filters = ", ".join(f"{key}={value}" for key, value in where.items())
        raise UserError(
            f"--where: none of {len(training_runs)} training runs has {filters}; {_values(training_runs, where)}"
        )
    ordered = sorted_runs(chosen, sort_by, ascending=ascending)
    console = stdout_console()
    console.print(fitting_table(ordered[:limit], len(chosen), console))


def sorted_runs(runs: Iterable[Run], sort_by: str, *, ascending: bool) -> list[Run]:
    """Return runs ordered by a metric or param, numbers before words; those without it last.

    Raises:
        UserError: No run has it.
    """
    runs = list(runs)
    with_key = [run for run in runs if _value(run, sort_by) is not None]
    if not with_key and sort_by != ACCURACY:  # no run has it before the first evaluation
        names = sorted({name for run in runs for name in (*run.data.metrics, *run.data.params)})
        near = [name for name in names if sort_by.rpartition("/")[2] in name][:5]
        hint = f"; there are {', '.join(near)}" if near else suggestion(sort_by, names)
        hint = hint or ", such as eval/loss or train.seed"
        raise UserError(f"--sort-by: no run has {sort_by!r}: a metric or a param{hint}")
    with_key.sort(key=lambda run: _rank(_value(run, sort_by)), reverse=not ascending)
    return with_key + [run for run in runs if _value(run, sort_by) is None]


def fitting_table(runs: Sequence[Run], total: int, console: Console) -> Table:
    """Return the table with as many metrics as fit the width of the console."""
    wide = console.options.update(width=_UNLIMITED)
    for number in range(len(_METRICS), -1, -1):
        result = as_table(runs, total=total, num_metrics=number)
        if console.measure(result, options=wide).maximum <= console.width:
            break
    return result


def as_table(runs: Sequence[Run], *, total: int, num_metrics: int) -> Table:
    """Return the runs as a table: differing params, the accuracy, and the first `num_metrics` other metrics.

    Args:
        runs: Rows of the table.
        total: Number of runs before the limit.
        num_metrics: Number of metrics besides the accuracy.
    """
    metrics = [name for name in list(_METRICS)[:num_metrics] if any(name in run.data.metrics for run in runs)]
    titles = {name: _METRICS[name][0] for name in metrics}
    differing = _differing(runs)
    is_open = any(run.info.status != "FINISHED" for run in runs)
    best = max((run.data.metrics[ACCURACY] for run in runs if ACCURACY in run.data.metrics), default=None)
    several_machines = len({run.data.tags.get("machine") for run in runs}) > 1  # whose times are not comparable
    rows, styles = [], []
    for run in runs:
        is_best = best is not None and run.data.metrics.get(ACCURACY) == best
        params = _with_seeds(run.data.params)
        row = {"run": run.info.run_id[:_SHORT], "training": _title(run)}
        row |= {param.removeprefix("train."): params.get(param, "") for param in differing}
        row |= {"machine": run.data.tags.get("machine", "")} if several_machines else {}
        row |= {_ACCURACY_COLUMN: _accuracy(run, is_best=is_best)}
        row |= {title: _metric(run, name) for name, title in titles.items()}
        row |= {"status": run.info.status} if is_open else {}
        rows.append(row)
        styles.append("bold green" if is_best else None)
    right = {*rows[0]} - {"run", "training", "machine", "status"}
    no_wrap = ("run", _ACCURACY_COLUMN)
    return table(f"{len(runs)} of {total} training runs", rows, right, no_wrap=no_wrap, styles=styles)


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the params that differ between runs; a param of a kind counts only for runs of that kind."""
    used = [active_params(_with_seeds(run.data.params)) for run in runs]
    names = dict.fromkeys(name for params in used for name in params)
    return [name for name in names if len({params[name] for params in used if name in params}) > 1]


def _with_seeds(params: Mapping[str, str]) -> dict[str, str]:
    """Return the params of a run, with the seeds of all its members as its seed, such as `0–4`."""
    first, members = params.get(SEED), int(params.get(MEMBERS, 1))
    return {**params, SEED: f"{first}–{int(first) + members - 1}"} if first and members > 1 else dict(params)


def _fits(run: Run, where: Mapping[str, str]) -> bool:
    """Whether a run has these values. Case is ignored: MLflow has Python's `True` for `true` of params.yaml."""
    values = {key: _value(run, key) for key in where}
    return all(values[key] is not None and str(values[key]).casefold() == where[key].casefold() for key in where)


def _values(runs: Iterable[Run], where: Mapping[str, str]) -> str:
    """Return a sentence with the values that the keys of `where` have."""
    values = {key: sorted({str(value) for run in runs if (value := _value(run, key)) is not None}) for key in where}
    params = {name for run in runs for name in run.data.params}
    return "; ".join(
        f"{key} is {' or '.join(texts[:5])}" if texts else f"{key} is not a param{suggestion(key, params)}"
        for key, texts in values.items()
    )


def _value(run: Run, key: str) -> str | float | None:
    """Return the value of a metric or a param, or the data set; None if the run has none."""
    if key == "dataset":
        return str(run.data.tags.get(key))
    return run.data.metrics.get(key, run.data.params.get(key))


def _rank(value: str | float | None) -> tuple[int, float, str]:
    try:
        return 1, float(value or 0), ""
    except ValueError:
        return 0, 0.0, str(value)


def _title(run: Run) -> str:
    name = str(run.info.run_name)
    experiment = run.data.tags.get("dvc.exp_name")
    return f"{name} ({experiment})" if experiment else name


def _accuracy(run: Run, *, is_best: bool) -> str:
    metrics = run.data.metrics
    if ACCURACY not in metrics:
        return ""
    low, high = (metrics.get(f"{ACCURACY}_{end}") for end in ("low", "high"))
    interval = f" ({low:.2%}–{high:.2%})" if low is not None and high is not None else ""
    return f"{'* ' if is_best else ''}{metrics[ACCURACY]:.2%}{interval}".replace("%", "")


def _metric(run: Run, name: str) -> str:
    return _METRICS[name][1].format(run.data.metrics[name]).rstrip("%") if name in run.data.metrics else ""
