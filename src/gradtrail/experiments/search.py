"""`search: optuna` in an entry of experiments.yaml: finds good params in fewer epochs than a grid.

Optuna's TPE proposes the params of each trial, which is a DVC experiment and a run like any other. With `prune`, a trial
is stopped after a few epochs, and the best ones go on: asynchronous successive halving (Li et al., arXiv 1810.05934).
Their trainings resume from their checkpoints, which no pruner of Optuna can do.

No study is stored: a proposal depends only on the trials before it, whose values are the curves of their runs in MLflow.
So the same command continues an interrupted search, and a finished one trains nothing. Only validation accuracies are
compared; the test accuracy of the best trial is printed at the end.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import optuna
import psutil
from mlflow.entities import Run
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from gradtrail.core.config import Bounds, Count, config
from gradtrail.experiments.sweep.engine import Engine, QueueEngine
from gradtrail.experiments.sweep.main import require_commit, sweep_lock
from gradtrail.experiments.sweep.spec import PATH, STAGE
from gradtrail.stages.common.params import MEMBERS, PARAMS, as_options, changed, read_yaml, require_known, validate
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError, with_store
from gradtrail.support.interpreter import with_this_interpreter
from gradtrail.support.shell import reason
from gradtrail.tracking.lineage.keys import state_key
from gradtrail.tracking.lineage.planned import PlannedStages
from gradtrail.tracking.mlflow.client import open_store
from gradtrail.tracking.mlflow.search import StoredRuns
from gradtrail.tracking.sync.sync import sync

_END_OF_EPOCH = re.compile(r"train: epoch .*\((\d+)/(\d+), ")  # a line of the training
_DIVERGED = "training diverged"
_VALIDATION, _TEST = "train/validation_accuracy", "eval/accuracy"
_LAST_LINES = 40  # that are searched for the reason of a failure


@config
class Pruning:
    """Which trials go on, and when."""

    after_epochs: Count  # every trial is trained for these
    keep_one_in: Annotated[int, Bounds(at_least=2)]  # of this many trials one goes on, to this many times the epochs


@config
class Search:
    """An entry of experiments.yaml."""

    search: Literal["optuna"]
    trials: Count
    space: dict[str, Any]  # key of params.yaml → list of values, or the fields of Optuna's `FloatDistribution`
    set: dict[str, Any] = field(default_factory=dict)  # changes to the params of all trials
    prune: Pruning | None = None
    about: str = ""


@dataclass(kw_only=True, eq=False)
class Trial:
    """A trial, whose training may be stopped and go on."""

    point: dict[str, Any]  # key → value, as Optuna has it
    epochs: int = 0  # epochs until it was stopped, or all
    curve: list[float] = field(default_factory=list)  # validation accuracy of each epoch; empty if it diverged
    run: Run | None = None  # run of the training

    @property
    def changes(self) -> dict[str, Any]:
        """Changes to the params; numbers have four digits."""
        return {
            key: json.loads(value if isinstance(value, str) else f"{value:.4g}") for key, value in self.point.items()
        }

    def accuracy(self, epochs: int) -> float:
        """Return the best validation accuracy of the first epochs, as a training returns its best weights."""
        return max(self.curve[:epochs], default=0.0)

    def __str__(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.changes.items())


def run(name: str, entry: Mapping[str, Any], on: Engine) -> int:
    """Search, print the best trial, and return the exit status.

    Trials are trained one after the other. On a cluster, whose machines share no checkpoints, none is stopped.

    Raises:
        UserError: The entry is invalid, or a training failed, other than by divergence.
    """
    search, params = validate(dict(entry), Search, f"{PATH}: {name}"), read_yaml(PARAMS)
    space = read_space(search, params, f"{PATH}: {name}")
    epochs: int = changed(params, search.set)[TRAIN]["epochs"]
    stops = stops_of(search, epochs) if isinstance(on, QueueEngine) else [epochs]
    require_commit()
    with sweep_lock():
        if status := on.prepare(name):
            return status
        trials = with_store(lambda: find(search, space, stops, _Trainings(name, search, on).train))
    best, num_epochs = trials[0], sum(len(trial.curve) for trial in trials)
    if best.run:
        accuracy, experiment = best.run.data.metrics[_TEST], best.run.data.tags.get("dvc.exp_name")
        print(f"{name}: {len(trials)} trials in {num_epochs} epochs; the best: {best}: test accuracy {accuracy:.2%}")
        print(f"`dvc exp apply {experiment}` brings its params and results into the working folder")
    return 0


def read_space(search: Search, params: Mapping[str, Any], place: str) -> dict[str, BaseDistribution]:
    """Return the distribution of each param; raise UserError if a key or a value is invalid."""
    require_known(params, search.set | search.space, place)
    if other := [key for key in search.set | search.space if not key.startswith(f"{TRAIN}.")]:
        raise UserError(f"{place}: {other[0]}: a search changes params of `{TRAIN}` alone")
    space: dict[str, BaseDistribution] = {}
    for key, values in search.space.items():
        try:
            is_list = isinstance(values, list)
            space[key] = CategoricalDistribution([*map(json.dumps, values)]) if is_list else FloatDistribution(**values)
        except (TypeError, ValueError) as error:
            raise UserError(f"{place}.space.{key}: must be a list, or low and high, and log: {error}") from None
    return space


def stops_of(search: Search, epochs: int) -> list[int]:
    """Return the numbers of epochs after which a trial is stopped; the last one is the whole training."""
    stops: list[int] = []
    while search.prune and (stop := search.prune.after_epochs * search.prune.keep_one_in ** len(stops)) < epochs:
        stops.append(stop)
    return [*stops, epochs]


def find(
    search: Search, space: dict[str, BaseDistribution], stops: Sequence[int], train: Callable[[Trial, int], object]
) -> list[Trial]:
    """Return the trials of a search, the best first; `train` trains a trial until an epoch, and sets its curve."""
    trials: list[Trial] = []
    while True:
        # A trial that may go on comes before a new one; at the end, the best one goes on in any case
        trial = _promoted(trials, stops, search, least=0)
        if trial is None and len(trials) < search.trials:
            trial = _propose(trials, space, stops[-1])
            trials.append(trial)
        trial = trial or _promoted(trials, stops, search, least=1)
        if trial is None:
            return sorted(trials, key=lambda trial: (-trial.epochs, -trial.accuracy(trial.epochs)))
        until = min(stop for stop in stops if stop > trial.epochs)
        train(trial, until)
        trial.epochs = until


def _promoted(trials: Sequence[Trial], stops: Sequence[int], search: Search, *, least: int) -> Trial | None:
    """Return a trial that goes on: it is one of the best at the epoch after which it was stopped."""
    for stop in reversed(stops[:-1]):
        ranked = sorted((trial for trial in trials if trial.epochs >= stop), key=lambda trial: -trial.accuracy(stop))
        num_kept = max(least, len(ranked) // search.prune.keep_one_in) if search.prune else 0
        for trial in ranked[:num_kept]:
            if trial.epochs == stop:
                return trial
    return None


def _propose(trials: Sequence[Trial], space: dict[str, BaseDistribution], epochs: int) -> Trial:
    """Return a new trial, which depends on nothing but the earlier ones."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=len(trials)))
    for trial in trials:
        value, is_whole = trial.accuracy(trial.epochs), trial.epochs == epochs
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if is_whole else TrialState.PRUNED,
                value=value if is_whole else None,
                intermediate_values={trial.epochs: value},
                params=trial.point,
                distributions=space,
            )
        )
    return Trial(point=study.ask(space).params)


class _Trainings:
    """Trains trials as DVC experiments."""

    def __init__(self, name: str, search: Search, on: Engine):
        self._name = name
        self._set = search.set | {MEMBERS: 1}
        self._on = on
        self._stages = PlannedStages()

    def train(self, trial: Trial, until: int) -> None:
        """Train a trial until an epoch, unless it was."""
        sync()
        changes, why = self._set | trial.changes, ""
        if not self._read(trial, changes, until):
            if isinstance(self._on, QueueEngine):
                why = _run_until(changes, until)
            else:
                why = self._on.run(self._name, {str(trial): changes}, {str(trial): changes}, STAGE).get(str(trial), "")
            sync()
            if _DIVERGED in why:
                trial.curve = []
            elif not self._read(trial, changes, until):
                raise UserError(f"{self._name}: {trial}: {why or 'has no run in MLflow'}")
        print(f"{self._name}: {trial}: validation {trial.accuracy(until):.2%} (epoch {until})", file=sys.stderr)

    def _read(self, trial: Trial, changes: Mapping[str, Any], until: int) -> bool:
        """Read the run of a trial; return whether it was trained until an epoch, and evaluated if that is the last."""
        params, store = changed(self._stages.params, changes), open_store()
        entry = self._stages.entry(TRAIN, params, {})
        runs = StoredRuns(store)({"state": state_key(TRAIN, entry)}) if entry else []
        if not runs:
            return False
        trial.run = next((run for run in runs if run.info.status == "FINISHED"), runs[0])
        points = store.get_metric_history(trial.run.info.run_id, _VALIDATION)
        trial.curve = [point.value for point in sorted(points, key=lambda point: point.step)]
        return len(trial.curve) >= until < params[TRAIN]["epochs"] or _TEST in trial.run.data.metrics


def _run_until(changes: Mapping[str, Any], until: int) -> str:
    """Run an experiment, whose training is stopped after an epoch, unless it is the last; return why it failed."""
    command = [sys.executable, "-m", "dvc", "exp", "run", "--temp", *as_options(changes), STAGE]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    last, is_stopped = deque[str](maxlen=_LAST_LINES), False
    with subprocess.Popen(command, env=with_this_interpreter(), **streams) as process:
        for line in process.stdout or ():
            last.append(line)
            end = _END_OF_EPOCH.search(line)
            if end and not is_stopped and until <= int(end[1]) < int(end[2]):
                is_stopped = True  # a second signal would end the training without a checkpoint
                with contextlib.suppress(psutil.Error):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        if child.cmdline()[1:] == ["-m", "pipeline.train"]:
                            child.terminate()
    return reason("".join(last)) if process.returncode and not is_stopped else ""
