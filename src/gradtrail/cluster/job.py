"""The job on the cluster: `python -m gradtrail.cluster.job`, in a folder with `request.json`.

Ray schedules tasks, counts resources, restarts a task whose worker or node died, and requests nodes if some wait. This
module submits the experiments, those that share an unfinished state one after the other, and logs each step.
"""

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from gradtrail.cluster.events import SOME_FAILED, Event
from gradtrail.cluster.make import make_experiment
from gradtrail.cluster.request import Experiment, Request, require_same_versions
from gradtrail.support.errors import UserError, one_line, redacted

REQUEST = Path("request.json")
_MOST_RETRIES = 20  # retries of a task whose worker or node died
_POLL_SECONDS = 1.0
_LOOK_SECONDS = 3.0  # time between two queries of which tasks run where


def main() -> int:
    """Run all experiments; return the exit status: 0, `SOME_FAILED`, or 2 if the request is refused."""
    began = time.monotonic()

    def log(name: str, state: Any, detail: str = "", attempt: int = 0) -> None:
        seconds = round(time.monotonic() - began, 1)
        event = Event(name=name, state=state, seconds=seconds, detail=redacted(detail), attempt=attempt)
        print(event.line(), flush=True)

    try:
        request = Request.read(REQUEST)
        require_same_versions(request, platform.node())
        ray.init(log_to_driver=False, logging_level="warning")
        return _Job(request, log).run()
    except UserError as error:
        log("", "refused", str(error))
        return 2


class _Job:
    """The experiments of a request, as tasks of Ray."""

    def __init__(self, request: Request, log: Callable[..., None]):
        self._log = log
        self._task = ray.remote(
            num_cpus=request.cpus,
            num_gpus=request.gpus,
            max_retries=_MOST_RETRIES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )(_make)
        self._request_ref = ray.put(request)
        self._tasks: dict[Any, Experiment] = {}
        self._waiting = [*request.experiments]
        self._made: set[str] = set()  # keys of shared states that exist by now
        self._running: dict[str, tuple[str, int]] = {}  # name → node and attempt that were logged last
        self._num_failed = 0

    def run(self) -> int:
        for experiment in self._waiting:
            self._log(experiment.name, "waiting")
        last_look = 0.0
        while self._tasks or self._waiting:
            self._submit_ready()
            ended, _ = ray.wait([*self._tasks], timeout=_POLL_SECONDS)
            for task in ended:
                self._finish(self._tasks.pop(task), task)
            if time.monotonic() - last_look > _LOOK_SECONDS:
                self._log_running()
                last_look = time.monotonic()
        return SOME_FAILED if self._num_failed else 0

    def _submit_ready(self) -> None:
        """Submit the experiments that need no state which another experiment of this job is making."""
        unfinished = {key for experiment in self._tasks.values() for key in experiment.shared} - self._made
        for experiment in [*self._waiting]:
            if not unfinished & {*experiment.shared}:
                self._waiting.remove(experiment)
                task = self._task.options(name=experiment.name).remote(self._request_ref, experiment)
                self._tasks[task] = experiment
                unfinished |= {*experiment.shared} - self._made

    def _finish(self, experiment: Experiment, task: Any) -> None:
        """Log the outcome of a task that ended."""
        try:
            outcome, detail = ray.get(task), ""
            self._made |= {*experiment.shared}
        except RayTaskError as error:
            outcome, detail = "failed", one_line(error.cause)
        except ray.exceptions.RayError as error:
            outcome, detail = "failed", f"Ray: {one_line(error)[:300]}"
        self._num_failed += outcome == "failed"
        self._log(experiment.name, outcome, detail)

    def _log_running(self) -> None:
        """Log which experiments started to run since the last call, and on which node."""
        names = {experiment.name for experiment in self._tasks.values()}
        for name, node, attempt in _running_tasks():
            if name in names and self._running.get(name) != (node, attempt):
                self._running[name] = node, attempt
                self._log(name, "running", f"node {node[:8]}", attempt)


def _make(request: Request, experiment: Experiment) -> str:
    require_same_versions(request, f"node {ray.get_runtime_context().get_node_id()[:8]} ({platform.node()})")
    return make_experiment(request, experiment)


def _running_tasks() -> Iterator[tuple[str, str, int]]:
    """Yield name, node and attempt of each running task; nothing if Ray's state API does not answer."""
    from ray.util.state import list_tasks
    from ray.util.state.exception import RayStateApiException

    with contextlib.suppress(RayStateApiException, OSError):
        job = ray.get_runtime_context().get_job_id()
        for task in list_tasks(filters=[("state", "=", "RUNNING"), ("job_id", "=", job)], limit=10_000, timeout=5):
            yield task.name, task.node_id or "", task.attempt_number


if __name__ == "__main__":
    sys.exit(main())
