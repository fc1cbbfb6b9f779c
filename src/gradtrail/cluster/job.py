"""The job on the cluster: `python -m gradtrail.cluster.job`, in a folder with `request.json`.

Ray schedules tasks, counts resources, restarts a task whose worker or node died, and requests nodes if some wait. This
module submits the experiments, those that share an unfinished state one after the other, and prints a line for each
that ends.
"""

import platform
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from gradtrail.cluster.request import FAILED, REQUEST, SOME_FAILED, PlannedExperiment, Request
from gradtrail.cluster.task import make_experiment
from gradtrail.support.errors import one_line, redacted


def main() -> int:
    """Run all experiments; return the exit status."""
    request = Request.from_json(Path(REQUEST).read_text(encoding="utf-8"))
    ray.init(log_to_driver=False, logging_level="warning")
    make = ray.remote(
        num_cpus=request.cpus,
        num_gpus=request.gpus,
        max_retries=20,  # each after the death of its worker or node
        scheduling_strategy="SPREAD",
    )(_make)
    waiting, tasks = [*request.experiments], dict[Any, PlannedExperiment]()
    made = set[str]()  # keys of shared states that exist by now
    num_failed = 0
    while waiting or tasks:
        # An experiment waits while another one makes a state that it needs as well
        unfinished = {key for experiment in tasks.values() for key in experiment.shared} - made
        for experiment in [*waiting]:
            if unfinished.isdisjoint(experiment.shared):
                waiting.remove(experiment)
                tasks[make.options(name=f"gradtrail {experiment.label}").remote(request, experiment)] = experiment
                unfinished |= {*experiment.shared} - made

        (ended,), _ = ray.wait([*tasks])
        experiment = tasks.pop(ended)
        try:
            outcome = ray.get(ended)
            made |= {*experiment.shared}
        except RayError as error:  # of the task, or its worker died too often
            outcome = f"{FAILED}{one_line(getattr(error, 'cause', error))[:500]}"
        num_failed += outcome.startswith(FAILED)
        count = len(request.experiments) - len(waiting) - len(tasks)
        print(redacted(f"{count} of {len(request.experiments)}: {experiment.label}: {outcome}"), flush=True)
    return SOME_FAILED if num_failed else 0


def _make(request: Request, experiment: PlannedExperiment) -> str:
    request.require_same_versions(f"node {ray.get_runtime_context().get_node_id()[:8]} ({platform.node()})")
    return make_experiment(request, experiment)


if __name__ == "__main__":
    sys.exit(main())
