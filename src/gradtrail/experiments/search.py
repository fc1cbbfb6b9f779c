"""`search: optuna` in an entry of experiments.yaml: finds good params in fewer epochs than a grid.

Optuna's TPE proposes the params of each trial, which is a DVC experiment and a run like any other. With `prune_after`,
`runtime.stop_after_epoch` stops trials, and the best go on (asynchronous successive halving, arXiv 1810.05934): their
trainings resume from their checkpoints, which no pruner of Optuna can do. With `--jobs N` or on Ray, N trials train at
the same time, and the next N are chosen when all have ended. No study is stored. A proposal depends only on the trials
before it and on N, with values from the curves of their runs in MLflow, so the same command continues an interrupted
search, and trains nothing twice. Trials are compared by validation accuracy; the test accuracy of the best one is
printed at the end.
"""

import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import optuna
from mlflow.entities import Run
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from gradtrail.core.config import Bounds, Count, config
from gradtrail.experiments.compare.main import NO_RUN, Engine, comparison_lock
from gradtrail.experiments.compare.queue import DvcQueue
from gradtrail.experiments.compare.spec import PATH, STAGE
from gradtrail.stages.common.params import MEMBERS, as_options, changed, require_known, validate
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError
from gradtrail.support.git import reason, with_interpreter
from gradtrail.tracking.runs import StoredRuns
from gradtrail.tracking.state import PlannedStages, state_key
from gradtrail.tracking.store import open_store
from gradtrail.tracking.sync import sync

Stops = dict["Trial", int]  # trials to train → number of epochs after which each stops
_TEST = "eval/accuracy"  # metric of the run of a training that was evaluated


@config
class Search:
    """An entry of experiments.yaml."""

    search: Literal["optuna"]
    trials: Count
    space: dict[str, Any]  # key of params.yaml → list of values, or the fields of Optuna's `FloatDistribution`
    set: dict[str, Any] = field(default_factory=dict)  # changes to the params of all trials
    prune_after: Count | None = None  # epochs of every trial, after which the best go on; None for whole trainings
    keep_one_in: Annotated[int, Bounds(at_least=2)] = 3  # of so many trials one goes on, to so many times the epochs
    about: str = ""


@dataclass(kw_only=True, eq=False)
class Trial:
    """A trial, whose training may be stopped and go on."""

    point: dict[str, Any]  # key → value, as Optuna has it: a choice is the JSON text of its value
    epochs: int = 0  # epochs until it was stopped, or all
    curve: list[float] = field(default_factory=list)  # validation accuracy of each epoch; empty if it diverged
    run: Run | None = None  # run of the training

    @property
    def changes(self) -> dict[str, Any]:
        """The changes to the params; a number has four digits, as in the trial's label."""
        texts = {key: value if isinstance(value, str) else f"{value:.4g}" for key, value in self.point.items()}
        return {key: json.loads(text) for key, text in texts.items()}

    def accuracy(self, epochs: int) -> float:
        """Return the best validation accuracy of the first epochs, as a training returns its best weights."""
        return max(self.curve[:epochs], default=0.0)

    def __str__(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.changes.items())


def run(name: str, entry: Mapping[str, Any], on: Engine, jobs: int = 1) -> int:
    """Search with so many trials at a time, print the best one, and return the exit status.

    On a cluster, whose machines share no checkpoints, no trial is stopped.

    Raises:
        UserError: The entry is invalid, or a training failed, other than by divergence.
    """
    search, stages = validate(dict(entry), Search, f"{PATH}: {name}"), PlannedStages()
    space = read_space(search, stages.params, f"{PATH}: {name}")
    epochs = changed(stages.params, search.set)[TRAIN]["epochs"]
    stops = stops_of(search, epochs) if isinstance(on, DvcQueue) else [epochs]
    with comparison_lock():
        on.prepare()
        trials = find(search, space, stops, functools.partial(_train, name, search, stages, on), jobs)
    best, num_epochs = trials[0].run, sum(len(trial.curve) for trial in trials)
    if best is None or _TEST not in best.data.metrics:
        raise UserError(f"{name}: all {len(trials)} trainings diverged")
    print(f"{name}: the best of {len(trials)} trials, in {num_epochs} epochs: {trials[0]}")
    print(f"test accuracy {best.data.metrics[_TEST]:.2%}; `gradtrail checkout {best.info.run_id[:8]}` restores it")
    return 0


def read_space(search: Search, params: Mapping[str, Any], place: str) -> dict[str, BaseDistribution]:
    """Return the distribution of each param; raise UserError if a key or a value is invalid."""
    require_known(params, search.set | search.space, place)
    for key in search.set | search.space:
        if not key.startswith("train.") or (key == "train.epochs" and key in search.space):
            raise UserError(f"{place}: {key}: a search changes only how a network is trained in the same epochs")
    space: dict[str, BaseDistribution] = {}
    for key, values in search.space.items():
        try:
            is_list = isinstance(values, list)
            space[key] = CategoricalDistribution([*map(json.dumps, values)]) if is_list else FloatDistribution(**values)
        except (TypeError, ValueError) as error:
            raise UserError(f"{place}.space.{key}: must be a list, or have low, high and log: {error}") from None
    return space


def stops_of(search: Search, epochs: int) -> list[int]:
    """Return the numbers of epochs after which a trial is stopped; the last one is a whole training."""
    if search.prune_after is None:
        return [epochs]
    stops = (search.prune_after * search.keep_one_in**power for power in itertools.count())
    return [*itertools.takewhile(lambda stop: stop < epochs, stops), epochs]


def find(
    search: Search,
    space: dict[str, BaseDistribution],
    stops: Sequence[int],
    train: Callable[[Stops], object],
    jobs: int = 1,
) -> list[Trial]:
    """Return the trials of a search, the best first; `train` trains `jobs` trials at a time, and sets their curves."""
    trials: list[Trial] = []
    while True:
        batch: Stops = {}
        while len(batch) < jobs:
            # A trial that may go on comes before a new one
            trial = _promoted(trials, stops, search, batch)
            if trial is None and len(trials) < search.trials:
                trial = _proposed(trials, space, stops[-1])
                trials.append(trial)
            if trial is None:
                break
            batch[trial] = min(stop for stop in stops if stop > trial.epochs)
        if not batch:
            return sorted(trials, key=lambda trial: (-trial.epochs, -trial.accuracy(trial.epochs)))
        train(batch)
        for trial, until in batch.items():
            trial.epochs = until


def _promoted(trials: Sequence[Trial], stops: Sequence[int], search: Search, batch: Stops) -> Trial | None:
    """Return a trial that is one of the best at its stop; if there is no new trial to come, at least the best one.

    None of `batch`, nor the best one as long as trials of it have not reached the stop.
    """
    for stop in reversed(stops[:-1]):
        ranked = sorted((trial for trial in trials if trial.epochs >= stop), key=lambda trial: -trial.accuracy(stop))
        is_all = len(trials) == search.trials and all(trial.epochs >= stop for trial in batch)
        for trial in ranked[: len(ranked) // search.keep_one_in or int(is_all)]:
            if trial.epochs == stop and trial not in batch:
                return trial
    return None


def _proposed(trials: Sequence[Trial], space: dict[str, BaseDistribution], epochs: int) -> Trial:
    """Return a new trial, which depends on nothing but the earlier ones."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=len(trials), constant_liar=any(not trial.epochs for trial in trials))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in trials:
        value, is_whole = trial.accuracy(trial.epochs), trial.epochs == epochs
        stopped = TrialState.PRUNED if trial.epochs else TrialState.RUNNING
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if is_whole else stopped,
                value=value if is_whole else None,
                intermediate_values={trial.epochs: value} if trial.epochs else {},
                params=trial.point,
                distributions=space,
            )
        )
    return Trial(point=study.ask(space).params)


def _train(name: str, search: Search, stages: PlannedStages, on: Engine, batch: Stops) -> None:
    """Train trials side by side, as DVC experiments, except those whose run has the epoch; set their curves."""
    changes = {trial: search.set | trial.changes | {MEMBERS: 1} for trial in batch}
    params = {trial: changed(stages.params, of_trial) for trial, of_trial in changes.items()}
    missing = [trial for trial, until in batch.items() if not _read(trial, stages, params[trial], until)]
    if isinstance(on, DvcQueue):

        def train(trial: Trial) -> str:
            return _run_experiment(
                changes[trial], batch[trial] if batch[trial] < params[trial][TRAIN]["epochs"] else None
            )

        with ThreadPoolExecutor(len(batch)) as pool:
            why = dict(zip(missing, pool.map(train, missing), strict=True))
    else:
        labels = {str(trial): changes[trial] for trial in missing}
        reasons = on.run(name, labels, labels, STAGE) if labels else {}
        why = {trial: reasons.get(str(trial), "") for trial in missing}
    for trial, until in batch.items():
        if "training diverged" in why.get(trial, ""):
            trial.curve = []
        elif trial in why and not _read(trial, stages, params[trial], until):
            raise UserError(f"{name}: {trial}: {why[trial] or NO_RUN}")
        print(f"{name}: {trial}: validation {trial.accuracy(until):.2%} (epoch {until})", file=sys.stderr)


def _read(trial: Trial, stages: PlannedStages, params: Mapping[str, Any], until: int) -> bool:
    """Read the curve of a trial; return whether it has an epoch, and the training was evaluated if that is the last."""
    sync()  # DVC may have restored outputs that have no run
    store, entry = open_store(), stages.entry(TRAIN, params, {})
    runs = StoredRuns(store)({"state": state_key(TRAIN, entry)}) if entry else []
    if not runs:
        return False
    trial.run = next((run for run in runs if run.info.status == "FINISHED"), runs[0])
    points = store.get_metric_history(trial.run.info.run_id, "train/validation_accuracy")
    trial.curve = [point.value for point in sorted(points, key=lambda point: point.step)]
    return len(trial.curve) >= until < params[TRAIN]["epochs"] or _TEST in trial.run.data.metrics


def _run_experiment(changes: Mapping[str, Any], stop: int | None) -> str:
    """Run an experiment whose training stops after an epoch unless it is None; return why it ended without results."""
    options = as_options({**changes, "runtime.stop_after_epoch": stop})
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "exp", "run", "--temp", *options, STAGE]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, env=with_interpreter(), **streams
    ) as process:  # after Ctrl-C it still stops by itself
        output, _ = process.communicate()
    return reason(output) if process.returncode else ""
