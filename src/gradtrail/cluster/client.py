"""Submits a job to a Ray cluster through its job server, or attaches to the running one, and follows it.

The job runs on the cluster independently: a command may stop following it and attach again. With Ray's client mode the
tasks would end when the laptop is closed.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import requests

import gradtrail
from gradtrail.cluster.events import SOME_FAILED, Event, events_in, other_lines
from gradtrail.cluster.request import Request
from gradtrail.stages.common.params import VERSIONS
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import reason

_ADDRESS = "such as http://10.0.0.5:8265"
_CONNECT_SECONDS = 5.0
_AWAY_SECONDS = 120.0  # longest time without an answer of the job server while a job is followed
_POLL_SECONDS = 1.0
_INSTALL = "Ray is not installed here: `make env CLUSTER=1`, or pip install 'gradtrail[cluster]'"


class Cluster:
    """A Ray cluster's job server.

    Args:
        address: Address such as `http://HOST:8265`.

    Raises:
        UserError: No Ray job server answers, or Ray is not installed here.
    """

    def __init__(self, address: str):
        if urlparse(address).scheme not in ("http", "https") or not urlparse(address).hostname:
            raise UserError(f"--on: must be the address of Ray's job server, {_ADDRESS}, or local; got {address!r}")
        client = require_ray()
        try:
            requests.get(f"{address.rstrip('/')}/api/version", timeout=_CONNECT_SECONDS)  # Ray's client has no timeout
            self._client: Any = client(address)
        except requests.HTTPError as error:
            raise UserError(
                f"--on {address}: the answer is not from a Ray job server ({one_line(error)[:200]})"
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"--on {address}: no Ray job server answers there ({type(error).__name__})") from None
        except RuntimeError as error:
            raise UserError(f"--on {address}: Ray refuses: {_reason(error)}") from None

    def start(self, request: Request, names: Sequence[str]) -> tuple[str, bool]:
        """Attach to the open job that runs certain experiments, or submit it.

        Args:
            request: Request of a new job.
            names: Names of all experiments of the command, including those that are done.

        Returns:
            The job's id, and whether it is new.
        """
        digest = hashlib.sha256("\n".join([request.git_url, *sorted(names)]).encode()).hexdigest()[:16]
        jobs = {job.submission_id: job for job in self._client.list_jobs() if job.submission_id}
        for number in range(1, len(jobs) + 2):
            name = f"gradtrail-{digest}" if number == 1 else f"gradtrail-{digest}-{number}"
            if name not in jobs:
                return name, self._submit(name, request)
            if not jobs[name].status.is_terminal():
                return name, False
        raise AssertionError

    def _submit(self, name: str, request: Request) -> bool:
        """Submit a job; return whether it is new: another command may just have submitted it."""
        with _shipped(request) as folder:
            try:
                self._client.submit_job(
                    entrypoint="python -m gradtrail.cluster.job",
                    submission_id=name,
                    runtime_env={"working_dir": str(folder)},
                    metadata={"commit": request.commit},
                )
            except RuntimeError as error:
                if "already" in str(error):
                    return False
                raise UserError(f"Ray refused the job: {_reason(error)}") from None
        return True

    def follow(self, job: str) -> Iterator[Event | None]:
        """Yield the events of a job from its beginning, and None after every poll, until it has ended.

        Raises:
            UserError: The job was refused or stopped, or failed as a whole, or its server does not answer.
        """
        num_seen, events = 0, list[Event]()
        answered = time.monotonic()
        while True:
            try:
                info, log = self._client.get_job_info(job), self._client.get_job_logs(job)
            except (RuntimeError, OSError) as error:
                if time.monotonic() - answered > _AWAY_SECONDS:
                    raise UserError(f"job {job}: Ray's job server does not answer ({one_line(error)[:200]})") from None
                time.sleep(_POLL_SECONDS)
                continue
            answered = time.monotonic()
            events = list(events_in(log))
            yield from events[num_seen:]
            num_seen = len(events)
            if info.status.is_terminal():
                self._require_end(job, info, events, other_lines(log))
                return
            yield None
            time.sleep(_POLL_SECONDS)

    def _require_end(self, job: str, info: Any, events: Sequence[Event], lines: Sequence[str]) -> None:
        """Raise UserError if a job did not run to its end."""
        if refused := next((event for event in events if event.state == "refused"), None):
            raise UserError(refused.detail)
        if info.status == "STOPPED":
            raise UserError(f"job {job} was stopped; the same command starts what is missing")
        if info.status == "FAILED" and info.driver_exit_code != SOME_FAILED:
            has_ended = info.driver_exit_code is not None  # otherwise its node died, which only Ray reports
            why = reason("\n".join(lines)) if has_ended and lines else one_line(info.message or "no reason given")
            raise UserError(f"job {job} failed: {why[:400]}; `ray job logs {job}` shows more")


def require_ray() -> Any:
    """Return the class of Ray's job client; raise UserError if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from ray.job_submission import JobSubmissionClient  # late: an optional package
    except ImportError:
        raise UserError(_INSTALL) from None
    logging.getLogger(JobSubmissionClient.__base__.__module__).setLevel(logging.WARNING)  # no messages about uploads
    return JobSubmissionClient


@contextlib.contextmanager
def _shipped(request: Request) -> Iterator[Path]:
    """Yield a folder with the request and this package, which Ray copies to the nodes."""
    package = Path(gradtrail.__file__ or "").parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / VERSIONS).parent.mkdir()
        shutil.copy(VERSIONS, folder / VERSIONS)
        request.write(folder / "request.json")
        yield folder


def _reason(error: RuntimeError) -> str:
    """Return the reason why Ray refused a request."""
    message = one_line(error)
    if "uthentication" in message or "nauthorized" in message:
        return "its token is missing or wrong; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    return message[:300]
