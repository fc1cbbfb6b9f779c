"""Trainings that differ only in the seed: a parent run, which shows their means and the 95 % intervals of these.

The parent is made from the runs of the trainings, so it can be made again at any time. MLflow keeps every point of a
curve, so other trainings of the variant get a new parent, and the old one is deleted. Out of scope: trainings with
several members, whose own runs show means over their seeds.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag, ViewType

from gradtrail.stages.common.params import MEMBERS, SEED
from gradtrail.stages.common.pipeline_file import TRAIN, sha256_of
from gradtrail.stages.model.members import over_members, spread
from gradtrail.tracking.names import rendered, rounded, seeds_name
from gradtrail.tracking.record import FINISHED, RUNNING
from gradtrail.tracking.runs import StoredRuns, search
from gradtrail.tracking.store import experiment_id, store_lock
from gradtrail.tracking.tags import NOTE, PARENT, REPLACED, STAGE, TRAININGS, VARIANT, clone_tag, outputs, process_tags

FIGURE = "seeds.png"  # artifact
_DRAWN = "train/validation_accuracy"
_CURVES = (_DRAWN, "train/validation_loss")
_NOT_AVERAGED = ("train/", "steps/", "system/", "profile/")  # curves of a training, and costs, which no seed changes
Curve = dict[int, list[float]]  # epoch → value of each training


class Variant:
    """The runs of a variant: finished trainings, the newest of each seed if there are several seeds, and parents."""

    def __init__(self, runs: Iterable[Run]):
        runs = sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))
        self.trainings = [
            run
            for run in runs
            if run.data.tags.get(STAGE) == TRAIN
            and run.data.params.get(MEMBERS, "1") == "1"
            and SEED in run.data.params
            and outputs(run.data.tags)
        ]
        by_seed = {int(run.data.params[SEED]): run for run in self.trainings}
        self.seeds = sorted(by_seed) if len(by_seed) > 1 else []
        self.runs = [by_seed[seed] for seed in self.seeds]
        self.key = sha256_of({"trainings": [run.info.run_id for run in self.runs]})
        self.parents = [run for run in runs if TRAININGS in run.data.tags]
        complete = (run for run in self.parents if run.data.tags[TRAININGS] == self.key and run.info.status == FINISHED)
        self.parent = next(complete, None)

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        parent_id = self.parent.info.run_id if self.parent else None
        has_parent = len(self.parents) == bool(self.seeds) == bool(self.parent)
        has_links = all(run.data.tags.get(PARENT) == parent_id for run in self.trainings)
        return has_parent and has_links and (self.parent is None or self.changes(self.parent) == ({}, {}))

    def changes(self, parent: Run) -> tuple[dict[str, float], dict[str, str]]:
        """Return what the parent lacks: metrics of later stages, once all trainings have them, and its description."""
        logged = [run.data.metrics.items() for run in self.runs]
        metrics = _means([{key: x for key, x in row if not key.startswith(_NOT_AVERAGED)} for row in logged])
        figure = FIGURE if _DRAWN in parent.data.metrics else ""
        run_id = parent.info.run_id
        tags = {NOTE: rendered("seeds.md.j2", run_id=run_id, seeds=self.seeds, metrics=metrics, figure=figure)}
        new = sorted(metrics.items() - parent.data.metrics.items())
        return dict(new), dict(tags.items() - parent.data.tags.items())


def update_parents(client: MlflowClient, runs: Iterable[Run]) -> None:
    """Make, update or remove the parents of all variants, given all runs of the store."""
    runs_of = defaultdict[str, list[Run]](list)
    for run in runs:
        runs_of[run.data.tags.get(VARIANT, "")].append(run)
    for variant in runs_of.keys() - {""}:
        if not Variant(runs_of[variant]).is_current:
            update_parent(client, variant)


def update_parent(client: MlflowClient, name: str) -> None:
    """Make, update or remove the parent of the trainings with this tag `variant`."""
    with store_lock(client.tracking_uri):  # so that two clones make one parent
        variant = Variant(StoredRuns(client)({VARIANT: name}))
        parent = variant.parent
        if parent is None and variant.seeds:
            deleted = search(client, f"tags.`{TRAININGS}` = '{variant.key}'", ViewType.DELETED_ONLY)
            if all(REPLACED in run.data.tags for run in deleted):  # by no person
                parent = _create(client, name, variant)
        for run in variant.trainings:
            if parent and run.data.tags.get(PARENT) != parent.info.run_id:
                client.set_tag(run.info.run_id, PARENT, parent.info.run_id)
            elif not parent and PARENT in run.data.tags:
                client.delete_tag(run.info.run_id, PARENT)
        for run in variant.parents:
            if run is not parent and run.info.status != RUNNING:  # a clone on another host may be making it
                client.set_tag(run.info.run_id, REPLACED, parent.info.run_id if parent else "")
                client.delete_run(run.info.run_id)
        if parent:
            metrics, tags = variant.changes(parent)
            client.log_batch(parent.info.run_id, _points(metrics, 0), tags=[RunTag(*pair) for pair in tags.items()])


def _create(client: MlflowClient, name: str, variant: Variant) -> Run:
    """Make the parent of a variant's trainings, but for its description and the metrics of later stages."""
    runs = variant.runs
    newest = max(runs, key=lambda run: run.info.start_time)
    params = set.intersection(*({*run.data.params.items()} for run in runs))
    tags = {VARIANT: name, TRAININGS: variant.key, **process_tags(), **clone_tag({})}
    run_name = seeds_name(newest.info.run_name, len(runs))
    parent = client.create_run(experiment_id(client, "models"), newest.info.start_time, tags, run_name)
    run_id, curves = parent.info.run_id, _read_curves(client, runs)
    points = [
        point
        for curve, epochs in curves.items()
        for epoch, values in epochs.items()
        for point in _points(_means([{curve: value} for value in values]), epoch)
    ]
    client.log_batch(run_id, points, [Param(*pair) for pair in sorted(params)])
    if _DRAWN in curves:
        with tempfile.TemporaryDirectory() as folder:
            _draw(curves[_DRAWN], Path(folder) / FIGURE, len(runs))
            client.log_artifact(run_id, f"{folder}/{FIGURE}")
    client.set_terminated(run_id, FINISHED, newest.info.end_time)
    return client.get_run(run_id)


def _read_curves(client: MlflowClient, runs: Sequence[Run]) -> dict[str, Curve]:
    """Return the curves of trainings, at the epochs that all of them have."""
    curves = {}
    for name in _CURVES:
        histories = [client.get_metric_history(run.info.run_id, name) for run in runs]
        values = [{point.step: point.value for point in history} for history in histories]
        if epochs := sorted(set.intersection(*({*one} for one in values))):
            curves[name] = {epoch: [one[epoch] for one in values] for epoch in epochs}
    return curves


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of what all rows have, with the ends of their intervals as `_low` and `_high`."""
    means = over_members(rows)
    return {key: rounded(x) for key, x in means.items() if key != "members" and not key.endswith("_sd")}


def _points(metrics: Mapping[str, float], step: int) -> list[Metric]:
    return [Metric(key, value, int(time.time() * 1000), step) for key, value in metrics.items()]


def _draw(curve: Curve, path: Path, count: int) -> None:
    """Draw the mean over the seeds, its interval, and the band from the lowest to the highest seed."""
    from gradtrail.stages.common import plotting  # late: few variants have several seeds

    figure, axes = plotting.new_figure(f"Mean over {count} seeds", size=(6.2, 3.2))
    axis, epochs, values = axes[0, 0], [*curve], [*curve.values()]
    means = [spread(_DRAWN, one) for one in values]
    band = {"color": plotting.BLUE, "alpha": 0.25, "linewidth": 0, "label": "lowest to highest seed"}
    axis.fill_between(epochs, [*map(min, values)], [*map(max, values)], **band)
    ends = {"color": plotting.VERMILLION, "linestyle": ":", "label": ("95 % interval of the mean", "_")}
    axis.plot(epochs, [(one.low, one.high) for one in means], **ends)
    axis.plot(epochs, [one.value for one in means], color=plotting.BLUE, label="mean")
    axis.set(xlabel="epoch", ylabel="validation accuracy")
    axis.legend(fontsize=8)
    plotting.save(figure, path)
