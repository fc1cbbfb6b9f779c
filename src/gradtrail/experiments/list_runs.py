"""`gradtrail runs`: a table of the training runs, the params in which they differ, and the best of each data set."""

from collections.abc import Callable, Mapping, Sequence

from gradtrail.stages.common.params import MEMBERS, SEED, active_params
from gradtrail.support.errors import UserError, suggestion
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import TextTable, duration
from gradtrail.tracking.trainings import Training, find_trainings

ACCURACY = "eval/accuracy"
_METRICS: dict[str, tuple[str, Callable[[float], str]]] = {  # metric → title and text
    "train/validation_accuracy": ("validation, %", lambda share: f"{100 * share:.2f}"),
    "train/seconds": ("train", duration),
    "train/compile_total_seconds": ("compile", duration),
    "gradients/noise_scale_typical": ("noise scale", "{:,.0f}".format),
}


def print_runs(*, sort_by: str, ascending: bool, where: Mapping[str, str], limit: int) -> None:
    """Print the training runs in the store, sorted by a metric; runs without it come last.

    `where` has required values of params, or of the data set as `dataset`; upper and lower case are equal. Raises
    UserError if no run has the metric or the values.
    """
    # Values are compared here: MLflow's language has no way to write all of them
    trainings = find_trainings(sort_by, ascending=ascending, limit=None if where else limit)
    runs = [run for run in trainings if _has(run, where)][:limit]
    if trainings and not runs:
        raise UserError(_no_match(trainings, where))
    if not runs:
        print("no training runs yet; `gradtrail repro` makes the first, `gradtrail sync` adds those of earlier results")
        return
    metrics = {name for run in runs for name in run.metrics}
    if sort_by not in metrics and sort_by != ACCURACY:  # which no run has before the first evaluation
        raise UserError(f"--sort-by: no run has the metric {sort_by!r}{suggestion(sort_by, metrics)}")
    console = stdout_console()
    console.print(as_table(runs))
    if len(runs) == limit:
        console.print(f"--limit {2 * limit} lists more")


def _has(run: Training, where: Mapping[str, str]) -> bool:
    params = {**run.params, "dataset": run.tags.get("dataset", "")}
    return all(key in params and params[key].lower() == value.lower() for key, value in where.items())


def _no_match(runs: Sequence[Training], where: Mapping[str, str]) -> str:
    """Return the error for filters that no run fits, with the values that there are."""
    hints = []
    for key in where:
        values = sorted({str(_params(run)[key]) for run in runs if key in _params(run)})
        names = {name for run in runs for name in _params(run)}
        hints.append(
            f"{key} is {' or '.join(values[:5])}" if values else f"{key} is not a param{suggestion(key, names)}"
        )
    filters = ", ".join(f"{key}={value}" for key, value in where.items())
    return f"--where: none of {len(runs)} training runs has {filters}; {'; '.join(hints)}"


def as_table(runs: Sequence[Training]) -> TextTable:
    """Return a table of the params that differ, the accuracy and other metrics."""
    # Machines, whose times are not comparable, and status have a column only if they differ, as params do
    facts = [_params(run) | {"machine": run.tags.get("machine", ""), "status": run.status} for run in runs]
    used = [active_params(values) for values in facts]  # a param of a kind counts only for runs of that kind
    names = dict.fromkeys(name for values in used for name in values)
    differing = [name for name in names if len({values[name] for values in used if name in values}) > 1]
    best: dict[str, float] = {}  # data set → highest accuracy
    for run, values in zip(runs, facts, strict=True):
        best[values["dataset"]] = max(best.get(values["dataset"], 0.0), run.metrics.get(ACCURACY, 0.0))

    rows, styles = [], []
    for run, values in zip(runs, facts, strict=True):
        tags, metrics = run.tags, run.metrics
        is_best = metrics.get(ACCURACY) == best[values["dataset"]]
        experiment = f" ({tags['dvc.exp_name']})" if "dvc.exp_name" in tags else ""
        row = {"run": run.run_id[:8], "training": f"{run.name}{experiment}"}
        row |= {name.removeprefix("train."): values.get(name, "") for name in differing}
        row["test accuracy, %"] = f"{'* ' if is_best else ''}{_accuracy(metrics)}"
        for name, (title, form) in _METRICS.items():
            row[title] = form(metrics[name]) if name in metrics else ""
        rows.append(row)
        styles.append("bold green" if is_best else None)

    title = f"{len(runs)} training runs; * marks the best of each data set"
    right = {*rows[0]} - {"run", "training", "machine", "status"}
    return TextTable(title, rows, right, styles)


def _params(run: Training) -> dict[str, str]:
    """Return the params of a run, with its data set, and the seeds of all its members as its seed, such as `0–4`."""
    params = {**run.params, "dataset": run.tags.get("dataset", "")}
    if (members := int(params.get(MEMBERS, 1))) > 1:
        params[SEED] = f"{params[SEED]}–{int(params[SEED]) + members - 1}"
    return params


def _accuracy(metrics: Mapping[str, float]) -> str:
    if ACCURACY not in metrics:
        return ""
    low, high = (metrics.get(f"{ACCURACY}_{end}", metrics[ACCURACY]) for end in ("low", "high"))
    return f"{metrics[ACCURACY]:.2%} ({low:.2%}–{high:.2%})".replace("%", "")
