"""A tracking server works by its address alone; whatever it does, the work goes on, and `sync` completes the runs."""

import hashlib
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from postgres import postgres, why_no_postgres
from projects import Project, stop
from ruamel.yaml import YAML
from servers import Client, Proxy, TrackingServer, free_port, make_clone, tracking_server
from small_project import make_small_project

from gradtrail.tracking.names import metric_name

pytestmark = pytest.mark.slow

STAGES = ["fetch", "train", "evaluate", "gradients"]
LR = "train.adamw.learning_rate"
WARNING = "warning: MLflow's store failed ("
NO_WEIGHTS = "no weights file of this project"  # but words, in the small project
ARTIFACTS = {  # of the small project's runs → the file that each is a copy of
    "evaluate": {"results/words.txt": "results/evaluate/words.txt"},
    "gradients": {"results/words.txt": "results/gradients/words.txt"},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    with tracking_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(running: TrackingServer) -> TrackingServer:
    """A server without runs."""
    running.remove_runs()
    return running


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A small project that never ran, without a store of its own."""
    project = make_small_project(tmp_path_factory.mktemp("fresh") / "project")
    (project.folder / "mlflow.db").unlink(missing_ok=True)
    shutil.rmtree(project.folder / "mlruns", ignore_errors=True)
    return project


@pytest.fixture
def project(fresh: Project, tmp_path: Path) -> Project:
    shutil.copytree(fresh.folder, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")


def test_server_works_by_its_address(project: Project, server: TrackingServer, tmp_path: Path) -> None:
    check_whole_story(project, server, tmp_path)


def test_server_with_postgresql_works(project: Project, tmp_path: Path) -> None:
    if why := why_no_postgres():
        pytest.skip(why)
    with postgres() as database, tracking_server(tmp_path, database) as server:
        check_whole_story(project, server, tmp_path)


def check_whole_story(project: Project, server: TrackingServer, folder: Path) -> None:
    client = Client(project.folder, server.uri)
    output = client.dvc("repro")
    assert client.ran(output) == STAGES
    assert not [line for line in output.splitlines() if "warning" in line.lower() and NO_WEIGHTS not in line]
    check_runs(client, server)
    assert not (project.folder / "mlflow.db").exists()
    assert not (project.folder / "mlruns").exists(), "the artifacts are the server's"
    assert client.sync() == "4 runs present\n"
    client.commit("results")

    clone = make_clone(client, folder / "clone")
    clone.dvc("checkout")
    assert clone.ran(clone.dvc("repro")) == []
    assert clone.sync() == "4 runs present\n"
    assert clone.ran(clone.dvc("repro", "--force")) == STAGES
    assert clone.sync() == "4 runs present\n"
    check_runs(client, server)
    assert {run["tags"]["attempts"] for run in server.runs()} == {"2"}


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
def test_simultaneous_clones_have_one_run_per_state_after_a_sync(
    count: int, project: Project, server: TrackingServer, tmp_path: Path
) -> None:
    first = Client(project.folder, server.uri)
    clients = [first, *(make_clone(first, tmp_path / f"{number}", own_cache=True) for number in range(1, count))]
    for value in (0.005, 0.5):
        for client in clients:
            client.set(LR, value)
            client.set("runtime.tracking_seconds", 300.0)
        at_once = [client.start(sys.executable, "-m", "dvc", "repro") for client in clients]
        outputs = [process.communicate(timeout=300)[0] for process in at_once]
        assert {process.returncode for process in at_once} == {0}, outputs
        assert not any(WARNING in output for output in outputs), outputs
        assert {client.lock() for client in clients} == {first.lock()}
    for client in clients:
        client.sync()
        check_states(server, trainings={"0.005", "0.5"})
    assert {client.sync() for client in clients} == {"7 runs present\n"}


@pytest.fixture(
    params=["down", "dying", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("silent", "slow"))]
)
def bad_address(request: pytest.FixtureRequest, server: TrackingServer) -> Iterator[str]:
    if request.param == "down":
        yield f"http://127.0.0.1:{free_port()}"
        return
    with Proxy(server.port) as proxy:
        proxy.lives = {"silent": 0, "dying": 8}.get(request.param)
        proxy.delay = 1.0 if request.param == "slow" else 0.0
        yield proxy.uri


def test_unusable_server_costs_a_warning_and_sync_creates_the_runs(
    bad_address: str, project: Project, server: TrackingServer
) -> None:
    project.set("runtime.tracking_seconds", 2.0)
    output = Client(project.folder, bad_address).dvc("repro")
    assert project.ran(output) == STAGES
    check_warnings(output, times=len(STAGES))
    for run in server.runs():  # of the slow and the dying one
        assert run["status"] == "RUNNING"
    client = Client(project.folder, server.uri)
    assert "completed from their records: " in client.sync()
    check_runs(client, server)
    assert client.sync() == "4 runs present\n"


def test_stage_that_waits_for_a_silent_server_stops_on_a_signal(project: Project, server: TrackingServer) -> None:
    project.set("runtime.tracking_seconds", 60.0)
    with Proxy(server.port) as proxy:
        proxy.lives = 0
        process = Client(project.folder, proxy.uri).start_stage("fetch")
        output, seconds = stop(process, signal.SIGTERM, when=lambda: proxy.requests > 0)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert seconds < 30, "of the sixty that it would wait else"


def check_warnings(output: str, times: int = 1) -> None:
    """Assert that each stage said in one line what happened, and nothing else of it."""
    lines = [line for line in output.splitlines() if WARNING in line]
    assert len(lines) == times, output
    assert all(line.startswith(WARNING) and "the results are unaffected; `gradtrail sync`" in line for line in lines)
    rest = [line for line in output.splitlines() if WARNING not in line and NO_WEIGHTS not in line]
    assert not [line for line in rest if any(word in line for word in ("WARN", "rror", "etry", "Traceback"))], output


def check_runs(client: Client, server: TrackingServer) -> None:
    """Assert that each stage has one run, which is whole, and that the headlines stand on the training's."""
    runs = {run["tags"]["stage"]: run for run in server.runs()}
    assert sorted(runs) == sorted(STAGES)
    assert len(server.runs()) == len(STAGES)
    for run in runs.values():
        check_run(client, server, run)
    for stage in ("evaluate", "gradients"):
        assert runs[stage]["tags"]["mlflow.parentRunId"] == runs["train"]["id"]
    assert runs["train"]["metrics"]["eval/loss"] == 2
    assert runs["train"]["metrics"]["gradients/grad_norm_median"] == 4


def check_run(client: Client, server: TrackingServer, run: dict[str, Any]) -> None:
    """Assert that a run is closed and has all that the files and the lock say of its state."""
    stage = run["tags"]["stage"]
    lock = YAML(typ="safe").load(client.folder / "dvc.lock")["stages"][stage]
    assert run["status"] == "FINISHED"
    assert run["params"]["fetch.dataset"] == "digits"
    written = json.loads((client.folder / f"results/metrics/{stage}.json").read_bytes())
    assert run["metrics"][metric_name(stage, "length")] == written["length"]
    assert json.loads(server.artifact(run, "lineage.json"))[stage]["state"] == run["tags"]["state"]
    digests = {out["path"]: out["md5"] for out in lock["outs"]}
    for out, md5 in digests.items():
        assert run["outs"][out] == md5
    for artifact, out in ARTIFACTS.get(stage, {}).items():
        assert hashlib.md5(server.artifact(run, artifact), usedforsecurity=False).hexdigest() == digests[out]


def check_states(server: TrackingServer, trainings: set[str]) -> None:
    """Assert that each state has one run, none is open, and the trainings are those with these learning rates."""
    runs = server.runs()
    assert {run["status"] for run in runs} == {"FINISHED"}
    assert len({run["tags"]["state"] for run in runs}) == len(runs) == 1 + 3 * len(trainings)
    assert {run["params"][LR] for run in runs if run["tags"]["stage"] == "train"} == trainings
    ids = {run["tags"]["state"]: run["id"] for run in runs}
    for run in runs:
        if "train_state" in run["tags"]:
            assert run["tags"]["mlflow.parentRunId"] == ids[run["tags"]["train_state"]]
