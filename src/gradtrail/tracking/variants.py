"""Trainings that differ only in the seed: a parent run, which shows their means and the 95 % intervals of these.

The parent is made from the runs of the trainings, so it can be made again at any time. MLflow keeps every point of a
curve, so other trainings of the variant get a new parent, and the old one is deleted. Out of scope: trainings with
several members, whose own runs show means over their seeds.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from gradtrail.core.intervals import Interval
from gradtrail.stages.artifacts.members import spread
from gradtrail.stages.common.params import MEMBERS, SEED
from gradtrail.stages.common.pipeline_file import TRAIN, sha256_of
from gradtrail.tracking.names import NOTE, rounded, seeds_name, seeds_note
from gradtrail.tracking.record import RUNNING
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.store import experiment_id, store_lock
from gradtrail.tracking.tags import PARENT, SEEDS, VARIANT, outputs, process_tags

FIGURE = "seeds.png"  # artifact
_DRAWN = {"train/validation_accuracy": "validation accuracy", "train/validation_loss": "validation loss in nats"}
_CURVES = (*_DRAWN, "train/loss")
_TRAININGS = "mlflow.gradtrail.trainings"  # tag of a parent: digest of the ids of its trainings
_SAME_TAGS = ("dataset", "dataset_digest", "machine", "mlflow.user")  # that a parent has if its trainings share them
_OWN = ("train/", "steps/", "system/", "profile/")  # metrics of one training, and costs, which no seed changes
Curves = Mapping[str, Mapping[int, Sequence[float]]]  # metric → epoch → value of each seed


class Variant:
    """The runs of a variant: its finished trainings, the newest one of each seed, and its parents."""

    def __init__(self, runs: Iterable[Run]):
        runs = sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))
        self.parents = [run for run in runs if SEEDS in run.data.tags]
        self.trainings = [run for run in runs if _is_finished_alone(run)]
        by_seed = {int(run.data.params[SEED]): run for run in self.trainings}
        self.by_seed = dict(sorted(by_seed.items())) if len(by_seed) > 1 else {}  # empty: no parent is needed

    @cached_property
    def key(self) -> str:
        return sha256_of({str(seed): run.info.run_id for seed, run in self.by_seed.items()})

    @property
    def parent(self) -> Run | None:
        """The oldest complete parent of these trainings."""
        is_own = (run for run in self.parents if run.data.tags[_TRAININGS] == self.key and run.info.status != RUNNING)
        return next(is_own, None) if self.by_seed else None

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        ids = [run.info.run_id for run in self.parents]
        if self.parent is None:
            return not (ids or self.by_seed or any(PARENT in run.data.tags for run in self.trainings))
        has_links = all(run.data.tags.get(PARENT) == ids[0] for run in self.trainings)
        return len(ids) == 1 and has_links and self.changes(self.parent) == ({}, {})

    @cached_property
    def headlines(self) -> dict[str, float]:
        """The metrics of the stages below, which all trainings have: mean, and the ends of its interval."""
        first, *rest = [run.data.metrics for run in self.by_seed.values()]
        ends = {f"{name}{end}" for name in first for end in ("_low", "_high", "_sd")}  # of a single training
        names = [name for name in first if not name.startswith(_OWN) and name not in ends]
        shared = sorted(name for name in names if all(name in metrics for metrics in rest))
        values = {name: [first[name], *(metrics[name] for metrics in rest)] for name in shared}
        return {key: value for name in shared for key, value in _metrics(name, spread(name, values[name])).items()}

    def changes(self, parent: Run) -> tuple[dict[str, float], dict[str, str]]:
        """Return the headline metrics and the tags that the parent lacks."""
        metrics, logged = self.headlines, parent.data.metrics
        figure = FIGURE if any(name in logged for name in _DRAWN) else ""
        tags = {NOTE: seeds_note(parent.info.run_id, [*self.by_seed], metrics, figure)}
        new_tags = {key: value for key, value in tags.items() if parent.data.tags.get(key) != value}
        return {key: value for key, value in metrics.items() if logged.get(key) != value}, new_tags


def update_parents(client: MlflowClient, runs: Iterable[Run]) -> None:
    """Make, update or remove the parents of all variants, given all runs of the store."""
    variants = defaultdict[str, list[Run]](list)
    for run in runs:
        if VARIANT in run.data.tags:
            variants[run.data.tags[VARIANT]].append(run)
    for variant, members in variants.items():
        if not Variant(members).is_current:
            update_parent(client, variant)


def update_parent(client: MlflowClient, name: str) -> None:
    """Make, update or remove the parent of a variant's trainings."""
    find = StoredRuns(client)
    if Variant(find({VARIANT: name})).is_current:
        return
    with store_lock(client.tracking_uri):  # so that two clones make one parent
        variant = Variant(find({VARIANT: name}))
        parent = variant.parent or (_create(client, name, variant) if variant.by_seed else None)
        for run in variant.trainings:
            if parent and run.data.tags.get(PARENT) != parent.info.run_id:
                client.set_tag(run.info.run_id, PARENT, parent.info.run_id)
            elif not parent and PARENT in run.data.tags:
                client.delete_tag(run.info.run_id, PARENT)
        for run in variant.parents:
            if run is not parent and run.info.status != RUNNING:  # a clone on another host may be making it
                client.delete_run(run.info.run_id)
        if parent:
            metrics, tags = variant.changes(parent)
            points = [Metric(key, value, int(time.time() * 1000), 0) for key, value in metrics.items()]
            client.log_batch(parent.info.run_id, metrics=points, tags=[RunTag(*pair) for pair in tags.items()])


def _create(client: MlflowClient, name: str, variant: Variant) -> Run:
    """Make the parent of a variant's trainings, but for its description and what later stages add."""
    runs = [*variant.by_seed.values()]
    newest = max(runs, key=lambda run: (run.info.start_time, run.info.run_id))
    params = set.intersection(*({*run.data.params.items()} for run in runs))
    shared = set.intersection(*({*run.data.tags.items()} for run in runs))
    tags = {key: value for key, value in shared if key in _SAME_TAGS} | process_tags()
    run_id = client.create_run(
        experiment_id(client, "models"),
        start_time=newest.info.start_time,
        tags=tags | {VARIANT: name, SEEDS: str(len(runs)), _TRAININGS: variant.key},
        run_name=seeds_name(newest.info.run_name, len(runs)),
    ).info.run_id
    curves = _read_curves(client, [run.info.run_id for run in runs])
    now = int(time.time() * 1000)
    points = [
        Metric(key, value, now, epoch)
        for curve, by_epoch in curves.items()
        for epoch, values in by_epoch.items()
        for key, value in _metrics(curve, spread(curve, values)).items()
    ]
    client.log_batch(run_id, metrics=points, params=[Param(*pair) for pair in sorted(params)])
    if any(curve in curves for curve in _DRAWN):
        with tempfile.TemporaryDirectory() as folder:
            _draw(curves, Path(folder) / FIGURE, len(runs))
            client.log_artifact(run_id, f"{folder}/{FIGURE}")
    client.set_terminated(run_id, end_time=max(run.info.end_time or now for run in runs))
    return client.get_run(run_id)


def _read_curves(client: MlflowClient, run_ids: Sequence[str]) -> Curves:
    """Return the values of the epochs that all trainings have."""
    curves: dict[str, dict[int, list[float]]] = {}
    for name in _CURVES:
        points = [{point.step: point.value for point in client.get_metric_history(run, name)} for run in run_ids]
        if epochs := sorted(set.intersection(*({*one} for one in points))):
            curves[name] = {epoch: [one[epoch] for one in points] for epoch in epochs}
    return curves


def _metrics(name: str, interval: Interval) -> dict[str, float]:
    values = {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return {key: rounded(value) for key, value in values.items()}


def _is_finished_alone(run: Run) -> bool:
    """Whether a run is a training of a single member, which an attempt has finished."""
    tags, params = run.data.tags, run.data.params
    return tags.get("stage") == TRAIN and SEED in params and params.get(MEMBERS, "1") == "1" and bool(outputs(tags))


def _draw(curves: Curves, path: Path, count: int) -> None:
    """Draw the mean over the seeds, its interval, and the band from the lowest to the highest seed."""
    from gradtrail.stages.artifacts import plotting  # late: few variants have several seeds

    shown = [name for name in _DRAWN if name in curves]
    figure, axes = plotting.new_figure(f"Mean over {count} seeds", columns=len(shown), size=(6.2, 3.2))
    for axis, name in zip(axes[0], shown, strict=True):
        epochs, values = [*curves[name]], [*curves[name].values()]
        means = [spread(name, one) for one in values]
        ends = [one.low for one in means], [one.high for one in means]
        band = {"color": plotting.BLUE, "alpha": 0.25, "linewidth": 0, "label": "lowest to highest seed"}
        axis.fill_between(epochs, [*map(min, values)], [*map(max, values)], **band)
        for end, label in zip(ends, ("95 % interval of the mean", None), strict=True):
            axis.plot(epochs, end, color=plotting.VERMILLION, linestyle=":", label=label)
        axis.plot(epochs, [one.value for one in means], color=plotting.BLUE, label="mean")
        axis.set(xlabel="epoch", ylabel=_DRAWN[name])
        axis.legend(fontsize=8)
    plotting.save(figure, path)
