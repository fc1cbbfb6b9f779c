"""Runs experiments on a Ray cluster instead of DVC's queue: the option `--on`.

The job runs on the cluster independently: a command may stop following it, and the same command attaches again. With
Ray's client mode the tasks would end when the laptop is closed.
"""

import contextlib
import hashlib
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import requests

import gradtrail
from gradtrail.cluster.request import (
    FAILED,
    REQUEST,
    SOME_FAILED,
    Places,
    Request,
    local_places,
    own_versions,
    plan_experiments,
    read_refs,
    shared_places,
)
from gradtrail.cluster.task import FOLDER, copy_objects
from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.pipeline_file import output_digests
from gradtrail.support.errors import UserError, is_store_fault, one_line, printable, redacted
from gradtrail.support.git import reason, strict_git, with_interpreter
from gradtrail.support.paths import private_folder
from gradtrail.tracking.dvc_history import snapshot_of

LOCAL = "local"
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 1.0
_LINE = re.compile(r"\d+ of \d+: ")  # begin of a line of our own in a job's log, which also has Ray's


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Runs experiments as a job of a Ray cluster."""

    on: str  # address of the job server; `local` starts a Ray on this machine
    cpus: float  # CPUs per experiment
    gpus: float  # GPUs per experiment

    def prepare(self) -> None:
        """Check that the cluster can run experiments; raise UserError, with the remedy, if it cannot."""
        self._places()
        if self.on != LOCAL:
            connect(self.on)

    def run(
        self, title: str, planned: Mapping[str, Mapping[str, Any]], missing: Mapping[str, Mapping[str, Any]], stage: str
    ) -> dict[str, str]:
        """Run the missing ones of the planned experiments as one job; return the reason of each failure, by label."""
        places = self._places()
        refs = [experiment.ref for experiment in plan_experiments(planned, stage, places.commit)]
        experiments = tuple(plan_experiments(missing, stage, places.commit))
        request = Request(
            places=places, cpus=self.cpus, gpus=self.gpus, versions=own_versions(), experiments=experiments
        )
        with _local_cluster() if self.on == LOCAL else contextlib.nullcontext(self.on) as address:
            client = connect(address)
            job, is_new = start(client, request, refs)
            about = "submitted" if is_new else "is running already"
            print(f"{title}: job {job} {about}; {redacted(address)} shows what runs where", file=sys.stderr)
            if self.on != LOCAL:
                print(f"{title}: Ctrl-C leaves it running, `ray job stop {job}` stops it", file=sys.stderr)
            try:
                lines = follow(client, job, title)
            finally:
                fetch_results(places, [experiment.ref for experiment in experiments])
        return {label: why for label in missing for line in lines if (why := line.partition(f": {label}: {FAILED}")[2])}

    def _places(self) -> Places:
        return local_places() if self.on == LOCAL else shared_places()


def engine(on: str | None, cpus: float, gpus: float) -> RayEngine | None:
    """Return the engine that `--on` or `RAY_API_SERVER_ADDRESS` names; None for DVC's queue."""
    address = on or os.environ.get("RAY_API_SERVER_ADDRESS")  # as for Ray's own commands
    return RayEngine(on=address, cpus=cpus, gpus=gpus) if address else None


def connect(address: str) -> Any:
    """Return Ray's job client; raise UserError if no Ray job server answers, or Ray is not installed here."""
    if urlparse(address).scheme not in ("http", "https") or not urlparse(address).hostname:
        raise UserError(
            f"--on: must be the address of Ray's job server, such as http://10.0.0.5:8265, or local; got {address!r}"
        )
    client = _require_ray()
    try:
        requests.get(f"{address.rstrip('/')}/api/version", timeout=_CONNECT_SECONDS)  # Ray's client has no timeout
        return client(address)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--on {address}: no Ray job server answers there ({type(error).__name__})") from None
    except RuntimeError as error:
        raise UserError(f"--on {address}: Ray refuses: {_refusal(error)}") from None


def start(client: Any, request: Request, refs: Sequence[str]) -> tuple[str, bool]:
    """Attach to the running job of certain experiments, or submit it; return the job's id, and whether it is new.

    The id has the digest of all refs of the command, including those of experiments that are done.
    """
    digest = hashlib.sha256("\n".join([request.places.git_url, *sorted(refs)]).encode()).hexdigest()[:16]
    jobs = [job for job in client.list_jobs() if (job.submission_id or "").startswith(f"gradtrail-{digest}-")]
    for job in jobs:
        if not job.status.is_terminal():
            return job.submission_id, False
    name = f"gradtrail-{digest}-{len(jobs) + 1}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, REQUEST).write_text(request.as_json(), encoding="utf-8")
        try:
            client.submit_job(
                entrypoint="python -m gradtrail.cluster.job",
                submission_id=name,
                runtime_env={"working_dir": folder, "py_modules": [*gradtrail.__path__]},
            )
        except RuntimeError as error:
            if "already" in str(error):  # another command has just submitted it
                return name, False
            raise UserError(f"Ray refused the job: {_refusal(error)}") from None
    return name, True


def follow(client: Any, job: str, title: str) -> list[str]:
    """Print the lines of a job's log, from its beginning, until it has ended; return them.

    Raises UserError if the job was refused or stopped, or failed as a whole, or its server does not answer.
    """
    num_printed = 0
    while True:
        try:
            info, log = client.get_job_info(job), client.get_job_logs(job)
        except (RuntimeError, OSError) as error:
            raise UserError(f"job {job}: Ray's job server does not answer ({one_line(error)[:200]})") from None
        lines = [line for line in log[: log.rfind("\n") + 1].splitlines() if _LINE.match(line)]
        for line in lines[num_printed:]:
            print(printable(f"{title}: {line}"), file=sys.stderr, flush=True)
        num_printed = len(lines)
        if info.status.is_terminal():
            break
        time.sleep(_POLL_SECONDS)
    if info.status == "STOPPED":
        raise UserError(f"job {job} was stopped; the same command starts what is missing")
    if info.status == "FAILED" and info.driver_exit_code != SOME_FAILED:
        has_ended = info.driver_exit_code is not None  # otherwise its node died, which only Ray reports
        why = reason(log) if has_ended and log else one_line(info.message or "no reason given")
        raise UserError(f"job {job} failed: {why[:400]}; `ray job logs {job}` shows more")
    return lines


def fetch_results(places: Places, refs: Sequence[str]) -> None:
    """Fetch the refs of the experiments that are done, and the listings of their folders; warn if that fails.

    It fetches no files, which may be many: `dvc exp pull` does. A listing maps the files of a folder to their digests;
    without it a run cannot be matched by the files that it read.
    """
    try:
        published = read_refs(places.git_url, refs)
        if not published or places.cache is not None:  # then all is here: it is this repository and its cache
            return
        strict_git("fetch", "--quiet", "--no-tags", places.git_url, *(f"+{ref}:{ref}" for ref in published))
        snapshots = [snapshot for commit in published.values() if (snapshot := snapshot_of(commit))]
        sections = [section for snapshot in snapshots for section in snapshot.lock.values()]
        folders = {md5 for section in sections for md5 in output_digests(section).values() if md5.endswith(".dir")}
        if missing := [md5 for md5 in folders if listing(md5) is None]:
            from dvc.repo import Repo  # late: importing it takes half a second

            with Repo() as repo:
                copy_objects(missing, repo.cloud.get_remote_odb(), repo.cache.local)
    except Exception as error:
        # DVC and its libraries (`dvc_data`, `dvc_s3`, …)
        is_from_dvc = any(kind.__module__.partition(".")[0].partition("_")[0] == "dvc" for kind in type(error).__mro__)
        if not (is_from_dvc or isinstance(error, UserError) or is_store_fault(error)):
            raise
        message = printable(redacted(one_line(error)))[:300]
        print(f"warning: not all results are fetched yet ({message}); run the same command again", file=sys.stderr)


@contextlib.contextmanager
def _local_cluster() -> Iterator[str]:
    """Start Ray with a job server on loopback; yield the server's address, and stop Ray in the end."""
    _require_ray()
    import ray  # late: an optional package

    os.environ["PATH"] = with_interpreter()["PATH"]  # jobs start `python`
    os.environ.setdefault(FOLDER, str(private_folder() / "cluster"))
    context = ray.init(
        address="local",
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()


def _require_ray() -> Any:
    """Return the class of Ray's job client; raise UserError if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from ray.job_submission import JobSubmissionClient  # late: an optional package
    except ImportError:
        raise UserError(
            "Ray is not installed here: `make env CLUSTER=1`, or pip install 'gradtrail[cluster]'"
        ) from None
    logging.disable(logging.INFO)  # Ray's messages about uploads
    return JobSubmissionClient


def _refusal(error: RuntimeError) -> str:
    """Return the reason why Ray refused a request."""
    message = one_line(error)
    if "uthentication" in message or "nauthorized" in message:
        return "its token is missing or wrong; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    return message[:300]
