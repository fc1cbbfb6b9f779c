"""Engines that run experiments: DVC's queue on this machine, or a Ray cluster (`cluster/engine.py`)."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradtrail.experiments.sweep.queue import ExperimentQueue, bring_up_to_date, queue_experiments, wait_for
from gradtrail.stages.common.dvc_cache import require_copies
from gradtrail.stages.common.params import as_options
from gradtrail.tracking.lineage.recorded import find_experiments

_STILL_RUNNING = (
    "DVC's queue keeps running: `dvc queue status` shows it, `dvc queue stop --kill` stops it, "
    "and the same command waits for the rest"
)


class Engine(Protocol):
    """Runs experiments, given as label → changes to the params (dotted key → value)."""

    def prepare(self, title: str) -> int:
        """Prepare before the missing experiments are determined; return an exit status.

        Raises:
            UserError: The engine cannot run experiments at present.
        """
        ...

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Run experiments and wait for them.

        Args:
            title: Title of the progress bar or table.
            planned: All experiments of the command, label → changes.
            missing: Those of them to run.
            stage: Last stage to run.

        Returns:
            The reason of each failure, by label.
        """
        ...


@dataclass(frozen=True)
class QueueEngine:
    """DVC's queue of the working folder."""

    jobs: int  # number of experiments that run in parallel
    _queue: ExperimentQueue = field(default_factory=ExperimentQueue)

    def prepare(self, title: str) -> int:
        """Wait for experiments that were queued before, and run `dvc repro`; return its exit status.

        An experiment fails if DVC's cache lacks an output of the working folder.

        Raises:
            UserError: DVC cannot copy the repository.
        """
        require_copies()
        with self._explaining_interrupts(title):
            tasks = self._queue.read()
            earlier = {task: task for task in (*tasks.running, *tasks.waiting)}
            wait_for(self._queue, earlier, jobs=self.jobs, title="experiments queued before")
            return bring_up_to_date()

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Queue the missing experiments and wait for them; return the reason of each failure, by label."""
        del planned
        with self._explaining_interrupts(title):
            commands = [["exp", "run", "--queue", *as_options(changes), stage] for changes in missing.values()]
            labels = dict(zip(queue_experiments(commands), missing, strict=True))
            failed = wait_for(self._queue, labels, jobs=self.jobs, title=title)
        existing = {experiment.name for experiment in find_experiments()}
        lost = [name for name in labels if name not in existing and name not in failed]
        reasons = dict.fromkeys(failed, "") | dict.fromkeys(lost, "DVC reports success, but stored no experiment; ")
        return {labels[name]: f"{reason}`dvc queue logs {name}` shows why" for name, reason in reasons.items()}

    @contextlib.contextmanager
    def _explaining_interrupts(self, title: str) -> Iterator[None]:
        """Print what keeps running if the user presses Ctrl-C."""
        try:
            yield
        except KeyboardInterrupt:
            if self._queue.read().is_open:
                print(f"{title}: {_STILL_RUNNING}", file=sys.stderr)
            raise
