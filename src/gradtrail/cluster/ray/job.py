"""What a job runs on the cluster: `python -m gradtrail.cluster.ray.job`, in a folder with `request.json`.

Ray schedules, counts resources, starts a task again whose worker or node died, and has nodes added where some wait.
This only hands experiments to it, asks again for those that another job is making, and tells of each step in its log.
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

from gradtrail.cluster.ray.events import SOME_FAILED, Event
from gradtrail.cluster.task.make import make_experiment
from gradtrail.cluster.task.request import Experiment, Request, require_same_versions
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.secrets import redacted

REQUEST = Path("request.json")
_MOST_RETRIES = 20  # of a task whose worker or node died
_POLL_SECONDS = 1.0
_LOOK_SECONDS = 3.0  # between two questions to Ray which tasks run where
_BUSY_SECONDS = 10.0  # until an experiment that someone else makes is asked for again


def main() -> int:
    """Make all experiments; return the exit status: 0, `SOME_FAILED`, or 2 where the request is refused."""
    began = time.monotonic()

    def tell(name: str, what: Any, detail: str = "", attempt: int = 0) -> None:
        seconds = round(time.monotonic() - began, 1)
        event = Event(name=name, what=what, seconds=seconds, detail=redacted(detail), attempt=attempt)
        print(event.line(), flush=True)

    try:
        request = Request.read(REQUEST)
        require_same_versions(request, platform.node())
        ray.init(log_to_driver=False, logging_level="warning")
        return _Job(request, tell).run()
    except UserError as error:
        tell("", "refused", str(error))
        return 2


class _Job:
    """The experiments of a request, as tasks of Ray."""

    def __init__(self, request: Request, tell: Callable[..., None]):
        self._request = request
        self._tell = tell
        self._task = ray.remote(
            num_cpus=request.cpus,
            num_gpus=request.gpus,
            max_retries=_MOST_RETRIES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )(_make)
        self._put = ray.put(request)
        self._tasks: dict[Any, Experiment] = {}
        self._waiting = dict.fromkeys(request.experiments, 0.0)  # → when to ask for it
        self._made: set[str] = set()  # keys of states that experiments share
        self._told: dict[str, tuple[str, ...]] = {}
        self._num_failed = 0

    def run(self) -> int:
        for experiment in self._waiting:
            self._tell_once(experiment, "waiting")
        looked = 0.0
        while self._tasks or self._waiting:
            self._submit_free()
            ended, _ = ray.wait([*self._tasks], timeout=_POLL_SECONDS) if self._tasks else ([], None)
            for task in ended:
                self._end(self._tasks.pop(task), task)
            if not self._tasks and self._waiting:
                time.sleep(_POLL_SECONDS)
            elif time.monotonic() - looked > _LOOK_SECONDS:
                self._look()
                looked = time.monotonic()
        return SOME_FAILED if self._num_failed else 0

    def _submit_free(self) -> None:
        """Submit what waits, but for experiments that need a state which another one of this job is making."""
        in_work = {key for each in self._tasks.values() for key in each.shared} - self._made
        for experiment, when in [*self._waiting.items()]:
            if time.monotonic() >= when and not in_work & {*experiment.shared}:
                del self._waiting[experiment]
                task = self._task.options(name=experiment.name).remote(self._put, experiment)
                self._tasks[task] = experiment
                in_work |= {*experiment.shared} - self._made

    def _end(self, experiment: Experiment, task: Any) -> None:
        try:
            what, detail = ray.get(task), ""
        except RayTaskError as error:
            what, detail = "failed", one_line(error.cause)
        except ray.exceptions.RayError as error:
            what, detail = "failed", f"Ray: {one_line(error)[:300]}"
        if what == "busy":
            self._waiting[experiment] = time.monotonic() + _BUSY_SECONDS
            self._tell_once(experiment, "waiting", "someone else is making it")
            return
        self._num_failed += what == "failed"
        self._made |= {*experiment.shared} if what != "failed" else set()
        self._tell(experiment.name, what, detail)

    def _look(self) -> None:
        """Tell which experiments have begun to run since the last look, and where."""
        experiments = {each.name: each for each in self._tasks.values()}
        for name, node, attempt in _running():
            if name in experiments:
                self._tell_once(experiments[name], "running", f"node {node[:8]}", attempt)

    def _tell_once(self, experiment: Experiment, what: str, detail: str = "", attempt: int = 0) -> None:
        """Tell of a step, unless it is the one that was told last."""
        step = (what, detail, str(attempt))
        if self._told.get(experiment.name) != step:
            self._told[experiment.name] = step
            self._tell(experiment.name, what, detail, attempt)


def _make(request: Request, experiment: Experiment) -> str:
    require_same_versions(request, f"node {ray.get_runtime_context().get_node_id()[:8]} ({platform.node()})")
    return make_experiment(request, experiment)


def _running() -> Iterator[tuple[str, str, int]]:
    """Yield name, node and attempt of each task that runs; none where Ray's state cannot be had at the moment."""
    from ray.util.state import list_tasks
    from ray.util.state.exception import RayStateApiException

    with contextlib.suppress(RayStateApiException, OSError):
        job = ray.get_runtime_context().get_job_id()
        for task in list_tasks(filters=[("state", "=", "RUNNING"), ("job_id", "=", job)], limit=10_000, timeout=5):
            yield task.name, task.node_id or "", task.attempt_number


if __name__ == "__main__":
    sys.exit(main())
