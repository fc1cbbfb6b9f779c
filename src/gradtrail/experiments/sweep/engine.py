"""What runs experiments: DVC's queue on this machine, or whatever else has the same two methods."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradtrail.experiments.sweep.queue import ExperimentQueue, bring_up_to_date, queue_experiments, wait_for
from gradtrail.stages.common.dvc_cache import require_copies
from gradtrail.stages.common.overrides import as_options
from gradtrail.tracking.lineage.snapshots import find_experiments

_STILL_RUNNING = (
    "DVC's queue keeps running: `dvc queue status` shows it, `dvc queue stop --kill` stops it, "
    "and the same command waits for the rest"
)


class Engine(Protocol):
    """Runs experiments, each of which is a label and changes to the params: dotted key → value."""

    def prepare(self, title: str) -> int:
        """Do what has to be done before it is known which experiments are missing; return an exit status.

        Raises:
            UserError: the engine cannot run experiments as things are; one line.
        """
        ...

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Run experiments and wait for them.

        Args:
            title: of what is shown meanwhile.
            planned: label → changes, of all experiments that the command is about.
            missing: likewise, of those to run.
            stage: the last one to run.

        Returns:
            Label → why it failed, of those that did.
        """
        ...


@dataclass(frozen=True)
class QueueEngine:
    """DVC's queue of the working folder.

    Attributes:
        jobs: number of experiments that run at a time.
    """

    jobs: int
    _queue: ExperimentQueue = field(default_factory=ExperimentQueue)

    def prepare(self, title: str) -> int:
        """Wait for experiments that were queued before, and run `dvc repro`; return its exit status.

        An experiment fails where DVC's cache lacks an out of the working folder.

        Raises:
            UserError: DVC cannot copy the repository; one line.
        """
        require_copies()
        with self._telling(title):
            tasks = self._queue.read()
            earlier = {task: task for task in (*tasks.running, *tasks.waiting)}
            wait_for(self._queue, earlier, jobs=self.jobs, title="experiments queued before")
            return bring_up_to_date()

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Queue the missing experiments and wait for them; return label → why it failed."""
        del planned
        with self._telling(title):
            commands = [["exp", "run", "--queue", *as_options(changes), stage] for changes in missing.values()]
            labels = dict(zip(queue_experiments(commands), missing, strict=True))
            failed = wait_for(self._queue, labels, jobs=self.jobs, title=title)
        kept = {experiment.name for experiment in find_experiments()}
        lost = [name for name in labels if name not in kept and name not in failed]
        reasons = dict.fromkeys(failed, "") | dict.fromkeys(lost, "DVC reports success, but kept no experiment; ")
        return {labels[name]: f"{reason}`dvc queue logs {name}` shows why" for name, reason in reasons.items()}

    @contextlib.contextmanager
    def _telling(self, title: str) -> Iterator[None]:
        """Say what goes on where a person stops waiting."""
        try:
            yield
        except KeyboardInterrupt:
            if self._queue.read().is_open:
                print(f"{title}: {_STILL_RUNNING}", file=sys.stderr)
            raise
