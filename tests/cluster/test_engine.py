"""The address of a cluster, its jobs, and the fetch of their results; every failure is one line."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_repository import SharedRepository, run_git
from servers import free_port

from gradtrail.cluster import engine
from gradtrail.cluster.engine import connect, fetch_results, follow, start
from gradtrail.cluster.request import SOME_FAILED, Places, Request
from gradtrail.support.errors import UserError

PLACES = Places(commit="0" * 40, git_url="/srv/x.git", tracking_uri="http://127.0.0.1:5000", cache=None)
REQUEST = Request(places=PLACES, cpus=1.0, gpus=0.0, versions={}, experiments=())


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
        files = [path.name for path in Path(job["runtime_env"]["working_dir"]).iterdir()]
        self.submitted.append(job | {"files": files})
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
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0)
    return FakeClient()


def test_same_experiments_attach_to_the_running_job(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    job, is_new = start(client, REQUEST, ["b", "a"])
    assert is_new
    assert start(client, REQUEST, ["a", "b"]) == (job, False)
    other, is_new = start(client, REQUEST, ["a"])
    assert is_new
    assert other != job
    client.jobs[job] = "FAILED"
    again, is_new = start(client, REQUEST, ["a", "b"])
    assert is_new
    assert again not in (job, other)

    def refuse(**_: Any) -> None:
        raise RuntimeError("Job with submission_id already exists")

    monkeypatch.setattr(client, "submit_job", refuse)
    _, is_new = start(client, REQUEST, ["submitted", "by another command"])
    assert not is_new


def test_job_contains_the_code_and_no_environment(client: FakeClient) -> None:
    start(client, REQUEST, ["a"])
    (job,) = client.submitted
    assert job["files"] == ["request.json"]
    assert set(job["runtime_env"]) == {"working_dir", "py_modules"}, "variables would be shown by Ray's dashboard"
    assert Path(job["runtime_env"]["py_modules"][0], "cluster", "job.py").is_file()


def test_complete_lines_of_a_log_are_printed_once(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = "1 of 2: low: done", "2 of 2: high: failed: \x1b[31mno"
    client.looks = [("RUNNING", f"INFO of Ray\n{first}\n2 of"), ("FAILED", f"INFO of Ray\n{first}\n{second}\n")]
    assert follow(client, "job", "rates") == [first, second]
    assert capsys.readouterr().err.splitlines() == [
        f"rates: {first}",
        "rates: 2 of 2: high: failed: \\x1b[31mno",
    ]


@pytest.mark.parametrize(
    ("status", "exit_code", "log", "message"),
    [
        ("STOPPED", None, "", "job x was stopped; the same command starts what is missing"),
        ("FAILED", 2, "jax 1, but 2\n", "job x failed: jax 1, but 2; .*"),
        ("FAILED", 1, "Traceback:\nModuleNotFoundError: no jax\n", "job x failed: ModuleNotFoundError: no jax; .*"),
        ("FAILED", 1, "", "job x failed: its node died; .*"),
        ("FAILED", None, "some line\n", "job x failed: its node died; `ray job logs x` shows more"),
    ],
)
def test_job_that_did_not_end_is_one_line(
    client: FakeClient, status: str, exit_code: int | None, log: str, message: str
) -> None:
    client.exit_code = exit_code
    client.looks = [(status, log)]
    with pytest.raises(UserError, match=f"^{message}$"):
        follow(client, "x", "rates")


@pytest.mark.parametrize("address", ["10.0.0.5:8265", "ray://h:10001", "http://", "auto"])
def test_invalid_address_is_one_line(address: str) -> None:
    with pytest.raises(UserError, match=r"^--on: must be the address of Ray's job server, such as http://"):
        connect(address)


def test_missing_ray_and_unreachable_server_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    with pytest.raises(UserError, match=r"^Ray is not installed here: `make env CLUSTER=1`, or "):
        connect("http://h:8265")
    monkeypatch.setattr(engine, "_require_ray", lambda: FakeClient)
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"^--on {address}: no Ray job server answers there \(ConnectionError\)$"):
        connect(address)


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

    monkeypatch.setattr(engine, "_require_ray", lambda: refuse)
    monkeypatch.setattr(engine.requests, "get", lambda *_, **__: None)
    with pytest.raises(UserError, match=f"^--on http://h:8265: {message}"):
        connect("http://h:8265")


@pytest.mark.parametrize(
    "fault",
    [
        OSError("denied for very-secret\nagain"),
        type("ClientError", (Exception,), {"__module__": "botocore.exceptions"})("denied for very-secret\nagain"),
        TypeError("a bug"),
    ],
)
def test_failing_remote_is_a_warning_of_one_line_and_a_bug_is_raised(
    fault: Exception, shared: SharedRepository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise fault

    monkeypatch.setenv("SOME_PASSWORD", "very-secret")
    monkeypatch.chdir(shared.clone)
    monkeypatch.setattr(engine, "snapshot_of", fail)
    ref = "refs/exps/00/00/gradtrail-1"
    run_git(shared.bare, "update-ref", ref, shared.commit)
    places = Places(commit=shared.commit, git_url=shared.url, tracking_uri="sqlite:///x.db", cache=None)
    if isinstance(fault, TypeError):
        with pytest.raises(TypeError):
            fetch_results(places, [ref])
        return
    fetch_results(places, [ref])
    warning = "warning: not all results are fetched yet (denied for *** again); run the same command again\n"
    assert capsys.readouterr().err == warning
    assert run_git(Path(), "rev-parse", ref) == shared.commit
