"""The address of a cluster, the jobs and their events; every failure is one line."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_repository import new_request
from servers import free_port

from gradtrail.cluster import client as clients
from gradtrail.cluster.client import Cluster
from gradtrail.cluster.events import SOME_FAILED, Event, events_in
from gradtrail.cluster.progress import show
from gradtrail.support.errors import UserError

REQUEST = new_request(packages={})


class FakeClient:
    """Ray's job client, as far as it is used."""

    def __init__(self, address: str = ""):
        self.jobs: dict[str, str] = {}
        self.submitted: list[dict[str, Any]] = []
        self.looks: list[tuple[str, str]] = []
        self.exit_code: int | None = SOME_FAILED

    def list_jobs(self) -> list[Any]:
        return [SimpleNamespace(submission_id=name, status=Status(status)) for name, status in self.jobs.items()]

    def submit_job(self, **job: Any) -> None:
        folder = Path(job["runtime_env"]["working_dir"])
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        self.submitted.append(job | {"files": files})
        if job["submission_id"] in self.jobs:
            raise RuntimeError("Job with submission_id already exists")
        self.jobs[job["submission_id"]] = "RUNNING"

    def get_job_info(self, job: str) -> Any:
        status, _ = self.looks[0]
        return SimpleNamespace(status=Status(status), message="its node died", driver_exit_code=self.exit_code)

    def get_job_logs(self, job: str) -> str:
        return self.looks.pop(0)[1]


class Status(str):
    def is_terminal(self) -> bool:
        return self in ("STOPPED", "SUCCEEDED", "FAILED")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(clients, "require_ray", lambda: lambda _: fake)
    monkeypatch.setattr(clients.requests, "get", lambda *_, **__: None)
    monkeypatch.setattr(clients, "_POLL_SECONDS", 0)
    return fake


def test_same_experiments_attach_to_the_open_job(fake: FakeClient) -> None:
    cluster = Cluster("http://h:8265")
    job, is_new = cluster.start(REQUEST, ["b", "a"])
    assert is_new
    assert cluster.start(REQUEST, ["a", "b"]) == (job, False)
    other, is_new = cluster.start(REQUEST, ["a"])
    assert is_new
    assert other != job
    fake.jobs[job] = "FAILED"
    assert cluster.start(REQUEST, ["a", "b"]) == (f"{job}-2", True)
    assert cluster.start(REQUEST, ["a", "b"]) == (f"{job}-2", False)


def test_job_contains_the_code_and_no_environment(fake: FakeClient) -> None:
    Cluster("http://h:8265").start(REQUEST, ["a"])
    (job,) = fake.submitted
    assert {"request.json", "pipeline/versions.yaml", "gradtrail/cluster/job.py"} <= job["files"]
    assert set(job["runtime_env"]) == {"working_dir"}, "variables would be shown by Ray's dashboard"


def test_events_of_a_job_are_followed_to_its_end(fake: FakeClient) -> None:
    events = [Event(name="a", state=state, seconds=0.0) for state in ("waiting", "running", "made")]
    lines = [event.line() + "\n" for event in events]
    fake.looks = [("RUNNING", lines[0]), ("RUNNING", "".join(lines[:2])), ("SUCCEEDED", "".join(lines))]
    assert list(Cluster("http://h:8265").follow("job")) == [events[0], None, events[1], None, events[2]]


@pytest.mark.parametrize(
    ("status", "log", "message"),
    [
        ("STOPPED", "", "job x was stopped; the same command starts what is missing"),
        ("FAILED", Event(name="", state="refused", seconds=0, detail="jax 1, but 2").line() + "\n", "jax 1, but 2"),
    ],
)
def test_stopped_or_refused_job_is_one_line(fake: FakeClient, status: str, log: str, message: str) -> None:
    fake.looks = [(status, log)]
    with pytest.raises(UserError, match=f"^{message}$"):
        list(Cluster("http://h:8265").follow("x"))


@pytest.mark.parametrize(
    ("exit_code", "log", "message"),
    [
        (
            1,
            "Traceback:\nModuleNotFoundError: No module named 'jax'\n",
            "ModuleNotFoundError: .*",
        ),
        (1, "", "its node died"),
        (None, "some line\n", "its node died"),
    ],
)
def test_crashed_job_is_one_line_with_its_reason(
    fake: FakeClient, exit_code: int | None, log: str, message: str
) -> None:
    fake.exit_code = exit_code
    fake.looks = [("FAILED", log + Event(name="a", state="running", seconds=0).line() + "\n")]
    with pytest.raises(UserError, match=f"^job x failed: {message}; `ray job logs x` shows more$"):
        list(Cluster("http://h:8265").follow("x"))


@pytest.mark.parametrize("address", ["10.0.0.5:8265", "ray://h:10001", "http://", "auto"])
def test_invalid_address_is_one_line(address: str) -> None:
    with pytest.raises(UserError, match=r"^--on: must be the address of Ray's job server, such as http://"):
        Cluster(address)


def test_missing_ray_and_unreachable_server_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(UserError, match=r"^Ray is not installed here: `make env CLUSTER=1`, or "):
        Cluster("http://h:8265")
    monkeypatch.setattr(clients, "require_ray", lambda: FakeClient)
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"^--on {address}: no Ray job server answers there \(ConnectionError\)$"):
        Cluster(address)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            RuntimeError("Unauthenticated: wrong authentication token"),
            "Ray refuses: its token is missing or wrong; set RAY_",
        ),
        (RuntimeError("Version check returned 404."), r"Ray refuses: Version check returned 404\."),
        (ValueError("no JSON"), r"no Ray job server answers there \(ValueError\)"),
    ],
)
def test_refusal_of_the_server_is_one_line(monkeypatch: pytest.MonkeyPatch, fault: Exception, message: str) -> None:
    def refuse(_: str) -> None:
        raise fault

    monkeypatch.setattr(clients, "require_ray", lambda: refuse)
    monkeypatch.setattr(clients.requests, "get", lambda *_, **__: None)
    with pytest.raises(UserError, match=f"^--on http://h:8265: {message}"):
        Cluster("http://h:8265")


FIRST = Event(name="gradtrail-1", state="running", seconds=1.5, detail="node abc", attempt=2)
LAST = Event(name="", state="refused", seconds=2.0, detail="no such thing")


def test_complete_lines_of_a_log_are_read_as_events() -> None:
    log = f"a warning of Ray\n{FIRST.line()}\nnoise\n{LAST.line()}\n"
    assert list(events_in(log)) == [FIRST, LAST]
    log = f"{FIRST.line()}\n{LAST.line()}"
    assert list(events_in(log)) == [FIRST]
    assert list(events_in(log[:-5])) == [FIRST]


LABELS = {"gradtrail-1": "low, seed 0", "gradtrail-2": "high, seed 0"}


def event(name: str, state: str, detail: str = "", attempt: int = 0) -> Event:
    return Event(name=name, state=state, seconds=1.0, detail=detail, attempt=attempt)  # type: ignore[arg-type]


def test_pipe_gets_one_line_per_step_and_the_reasons_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        event("gradtrail-1", "waiting"),
        None,
        event("gradtrail-1", "running", "node abc"),
        event("gradtrail-1", "running", "node def", 1),
        event("gradtrail-2", "there"),
        event("of another command", "made"),
        event("gradtrail-1", "failed", "train: \x1b[31mno"),
    ]
    assert show("rates", events, LABELS) == {"gradtrail-1": "train: \x1b[31mno"}
    assert capsys.readouterr().err.splitlines() == [
        "rates: low, seed 0: waiting",
        "rates: low, seed 0: running (node abc)",
        "rates: low, seed 0: running (node def, attempt 2)",
        "rates: high, seed 0: done before (1 of 2)",
        "rates: low, seed 0: failed: train: \\x1b[31mno (2 of 2)",
    ]
