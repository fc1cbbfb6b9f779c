"""Runs experiments on a Ray cluster instead of DVC's queue: the option `--on`."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradtrail.cluster.client import Cluster
from gradtrail.cluster.home import fetch_experiments
from gradtrail.cluster.local import local_cluster
from gradtrail.cluster.places import Places, local_places, shared_places
from gradtrail.cluster.plan import plan_experiments
from gradtrail.cluster.progress import show
from gradtrail.cluster.request import Request, own_packages, own_python
from gradtrail.support.errors import redacted

LOCAL = "local"
VARIABLE = "RAY_API_SERVER_ADDRESS"  # in place of `--on`, as for Ray's own commands


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Runs experiments as a job of a Ray cluster."""

    on: str  # address of the job server; `local` starts a Ray on this machine
    cpus: float  # CPUs per experiment
    gpus: float  # GPUs per experiment

    def prepare(self) -> int:
        """Check that the cluster can run the experiments, before anything is submitted; return exit status 0.

        Raises:
            UserError: The cluster cannot run them; the message names the remedy.
        """
        self._places()
        if self.on != LOCAL:
            Cluster(self.on)
        return 0

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Run the missing ones of the planned experiments.

        Args:
            title: Title of the progress table.
            planned: All experiments of the command, label → changes to the params; the job's id is their digest.
            missing: Those of them to run.
            stage: Last stage to run.

        Returns:
            The reason of each failure, by label.

        Raises:
            UserError: The job as a whole failed.
        """
        places = self._places()
        names = [experiment.name for experiment in plan_experiments(planned, stage, places.commit)]
        experiments = plan_experiments(missing, stage, places.commit)
        request = Request(
            git_url=places.git_url,
            commit=places.commit,
            tracking_uri=places.tracking_uri,
            cache=places.cache,
            cpus=self.cpus,
            gpus=self.gpus,
            python=own_python(),
            packages=own_packages(),
            experiments=tuple(experiments),
        )
        labels = {experiment.name: experiment.label for experiment in experiments}
        with self._cluster() as cluster:
            job, is_new = cluster.start(request, names)
            print(
                f"{title}: job {job} {'submitted' if is_new else 'is running already; following it'}", file=sys.stderr
            )
            try:
                failed = show(title, cluster.follow(job), labels)
            except KeyboardInterrupt:
                if self.on != LOCAL:
                    print(
                        f"{title}: job {job} keeps running; run the same command to follow it again, "
                        f"`ray job stop {job} --address {redacted(self.on)}` stops it",
                        file=sys.stderr,
                    )
                raise
            finally:
                fetch_experiments(places, [*labels])
        return {labels[name]: why for name, why in failed.items()}

    def _places(self) -> Places:
        return local_places() if self.on == LOCAL else shared_places()

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        if self.on == LOCAL:
            with local_cluster() as address:
                yield Cluster(address)
        else:
            yield Cluster(self.on)


def engine(on: str | None, cpus: float, gpus: float) -> RayEngine | None:
    """Return the engine that `--on` or `RAY_API_SERVER_ADDRESS` names; None for DVC's queue."""
    address = on or os.environ.get(VARIABLE)
    return RayEngine(on=address, cpus=cpus, gpus=gpus) if address else None
