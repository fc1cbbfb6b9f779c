"""Whatever befalls the store, the logger or the stage: the work goes on, and the run has all that the journal says."""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from filelock import FileLock
from mlflow import MlflowClient
from projects import Project
from small_project import make_small_project

from gradtrail.stages.common import stage as stage_module
from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import UserError
from gradtrail.tracking import journal, logger, state
from gradtrail.tracking import store as client_module
from gradtrail.tracking.journal import READY, REPORTED, Journal, LoggerProcess, report_fault, tracked
from gradtrail.tracking.logger import RunLog, log_journals, sample_system
from gradtrail.tracking.names import NOTE, metric_name
from gradtrail.tracking.store import StoreClient
from gradtrail.tracking.tags import BEGAN
from gradtrail.tracking.tags import OUTS as OUTS_TAG

DEAD_SERVER = "http://127.0.0.1:9"
REQUESTS = ("create_run", "log_batch", "log_dict", "log_artifact", "log_artifacts", "log_inputs", "set_terminated")
OUTS = ["models/final.safetensors", "results/metrics/train.json"]


class LoggerInProcess:
    """A logger that reads the whole journal when its stage waits for it."""

    def follow(self, folder: Path) -> None:
        self.folder = folder

    def hurry(self) -> None: ...

    def close(self) -> None: ...

    def wait(self, seconds: float | None) -> bool:
        try:
            RunLog(self.folder, is_live=True).log()
        except Exception as error:
            report_fault(error)
            return False
        logger._remove(self.folder)
        return True


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_small_project(tmp_path_factory.mktemp("project") / "project")
    (project.folder / "data").mkdir()
    (project.folder / "data/words.txt").write_text("words")
    project.set("runtime.system_metrics", True)
    project.commit("all")
    return project


@pytest.fixture
def stage(project: Project, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The stage `train` in a folder whose store has no runs."""
    monkeypatch.chdir(project.folder)
    use_new_store(monkeypatch)
    monkeypatch.setattr(journal, "LoggerProcess", LoggerInProcess)
    monkeypatch.setattr(stage_module, "seconds_running", lambda: 0.0)  # a stage refuses code younger than its process
    for left in Path(".gradtrail").glob("journal/*/*"):
        logger._remove(left)
    return Stage("train")


def use_new_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a store without runs, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir="."), "mlflow.db").resolve().parent
    Project(folder).empty_store()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")


def write_all(run: Journal, weights: str = "weights", seconds: float = 2.0) -> None:
    """Do what a stage does, with every kind of event."""
    for epoch in range(3):
        run.curves({"train/loss": {epoch: 1.0 / (1 + epoch)}, "train/elapsed_seconds": {epoch: epoch}})
        run.alert(f"stalled: {epoch}")
    run.metrics({"seconds": seconds, "compile/total_seconds": 1.0})
    Path("profile").mkdir(exist_ok=True)
    Path("profile/process.csv").write_text("quantity,value\n")
    run.files(Path("profile"), "compile")
    Path("profile/process.csv").write_text("written over")
    run.timings(classes=10)
    Path("models").mkdir(exist_ok=True)
    Path("models/final.safetensors").write_text(weights)
    about = {"dataset": "words", "dataset_digest": "0" * 64, "loss": 2, "validation_accuracy": 0.5}
    Path("results/metrics").mkdir(parents=True, exist_ok=True)
    Path("results/metrics/train.json").write_text(json.dumps(about))
    run.outs()


def contents() -> dict[str, Any]:
    """Return what the only run of the store has, except times and names of processes."""
    client = MlflowClient(client_module.store_uri())
    (run,) = client.search_runs(["1", "2"])
    points = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    timings = json.loads(files["timings.json"].read_text()) if "timings.json" in files else {}
    return {
        "status": run.info.status,
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if key not in (BEGAN, NOTE)},
        "metrics": run.data.metrics,
        "points": points,
        "files": sorted(files),
        "profile": files["compile/process.csv"].read_text() if "compile/process.csv" in files else "",
        "timed": sorted(timings.get("seconds", {}).keys() - {"tracking"}),
        "times": (run.info.start_time, run.info.end_time),
    }


def journals() -> list[Path]:
    return [*Path(".gradtrail").glob("journal/*/*")]


def test_run_has_all_that_the_stage_wrote(stage: Stage) -> None:
    with tracked(stage) as run:
        write_all(run)
    found = contents()
    assert found["status"] == "FINISHED"
    assert found["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]
    assert found["points"][metric_name("train", "compile/total_seconds")] == [(0, 1.0)]
    assert found["profile"] == "quantity,value\n", "a file is logged as it was"
    assert sorted(json.loads(found["tags"][OUTS_TAG])) == OUTS
    assert found["tags"]["attempts"] == "1"
    assert found["tags"]["alert"] == "stalled: 0\nstalled: 1\nstalled: 2"
    assert found["timed"] == ["data", "imports", "work"]
    assert journals() == []


@pytest.mark.parametrize(
    ("fault", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_status_says_how_the_stage_ended(stage: Stage, fault: type[BaseException] | None, status: str) -> None:
    with pytest.raises(fault) if fault else contextlib.nullcontext(), tracked(stage) as run:
        run.curves({"train/loss": {0: 1.0}})
        if fault:
            raise fault
    assert contents()["status"] == status
    assert contents()["points"] == {"train/loss": [(0, 1.0)]}


def break_after(count: int, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let each request to the store after the first `count` fail; return the list of the requests."""
    made = list[str]()
    for name in REQUESTS:

        def request(*args: Any, real: Any, **kwargs: Any) -> Any:
            if len(made) >= count:
                raise fault
            made.append(real.__name__)
            return real(*args, **kwargs)

        monkeypatch.setattr(StoreClient, name, functools.partialmethod(request, real=getattr(StoreClient, name)))
    return made


def test_logging_that_breaks_at_any_request_is_completed_later(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the run of a logging that did not break."""
    with pytest.MonkeyPatch.context() as patch:
        requests = break_after(1000, ConnectionError(), patch)
        with tracked(stage) as run:
            write_all(run)
    expected, number = contents(), len(requests)
    assert number > 10
    for count in range(0, number, 1 if os.environ.get("NIGHTLY") else 3):
        use_new_store(monkeypatch)
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            break_after(count, ConnectionError("the server\nis gone"), patch)
            with tracked(Stage("train")) as run:
                write_all(run)
        lines = capsys.readouterr().err.splitlines()
        assert lines == [
            "warning: MLflow's store failed (ConnectionError: the server is gone); the results are unaffected; "
            "`gradtrail sync` completes this run later"
        ]
        Path("models/final.safetensors").write_text("of another state")
        assert log_journals() == ["train"]
        found = contents()
        assert found | {"times": None} == expected | {"times": None}, count
        assert journals() == []
    assert log_journals() == []


def test_times_and_system_metrics_are_those_of_the_stage_if_the_store_was_down(stage: Stage) -> None:
    began = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", DEAD_SERVER)
        with tracked(stage) as run:
            next(sample_system(run.folder))
    ended = time.time()
    time.sleep(0.1)
    assert log_journals() == ["train"]
    found = contents()
    assert found["status"] == "FINISHED"
    assert 0 <= found["points"]["system/cpu_utilization_percentage"][0][1] <= 100
    assert all(began - 1 <= at / 1000 <= ended for at in found["times"])


def test_clock_that_is_set_back_changes_no_order(stage: Stage) -> None:
    seconds = itertools.count(time.time(), -60)
    clock = {"time": lambda: next(seconds), "time_ns": time.time_ns, "monotonic": time.monotonic, "sleep": time.sleep}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "time", SimpleNamespace(**clock))
        break_after(0, ConnectionError(), patch)
        with tracked(stage) as run:
            write_all(run)
            next(sample_system(run.folder))
    assert log_journals() == ["train"]
    found = contents()
    assert found["status"] == "FINISHED"
    assert sorted(found["points"]["train/loss"]) == [(0, 1.0), (1, 0.5), (2, 0.3333)], "MLflow lists them by time"
    assert len(found["points"]["system/cpu_utilization_percentage"]) == 1


def test_journal_of_a_killed_stage_is_logged_as_killed(stage: Stage) -> None:
    class Killed(LoggerInProcess):
        def wait(self, seconds: float | None) -> bool:
            journal.write_identity(self.folder, run.stage)  # as a logger does when it begins
            with (self.folder / "events.jsonl").open() as events:
                lines = events.readlines()
            (self.folder / "events.jsonl").write_text("".join(lines[:4]) + '{"event": "cur')
            raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "LoggerProcess", Killed)
        with pytest.raises(SystemExit), tracked(stage) as run:
            write_all(run)
    assert log_journals() == ["train"]
    assert contents()["status"] == "KILLED"
    assert contents()["points"]["train/loss"] == [(0, 1.0), (1, 0.5)], "of the events before the cut"
    with tracked(Stage("train")) as run:
        write_all(run)
    assert contents()["status"] == "FINISHED"
    assert contents()["tags"]["attempts"] == "2"
    assert contents()["points"][metric_name("train", "compile/total_seconds")] == [(1, 1.0)], (
        "a point for each attempt that compiles"
    )


def test_measured_metrics_and_the_start_are_those_of_the_last_attempt(stage: Stage) -> None:
    for seconds in (2.0, 3.0):
        began = time.time()
        with tracked(Stage("train")) as run:
            write_all(run, seconds=seconds)
    (stored,) = MlflowClient(client_module.store_uri()).search_runs(["1", "2"])
    assert contents()["metrics"]["train/seconds"] == 3.0
    assert sorted(contents()["points"]["train/seconds"]) == [(0, 2.0), (1, 3.0)]
    assert stored.info.start_time / 1000 < began - 0.001 <= int(stored.data.tags[BEGAN]) / 1000


def test_journal_of_a_running_stage_is_left_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracked(stage) as run:
        lock = next(Path(".gradtrail/locks").glob(f"train-{run.folder.parent.name}*"))
        monkeypatch.setattr(state, "FileLock", lambda path: FileLock(path, is_singleton=False))
        assert lock.exists()
        assert log_journals() == []
        assert run.folder.exists()


def test_bug_in_the_stage_side_is_a_traceback_and_the_run_is_closed_as_failed(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracked(stage) as run:
        run.metrics({"accuracy": 1.0})
        run.checkpoint(None, {})  # type: ignore[arg-type]
        assert not run.is_open
        run.metrics({"loss": 1.0})
        run.outs()
    assert contents()["status"] == "FAILED"
    assert list(contents()["points"]) == ["train/accuracy"]
    *traceback, line = capsys.readouterr().err.splitlines()
    assert traceback[0].startswith("Traceback")
    assert line.startswith("warning: logging to MLflow failed because of the bug above; the results are unaffected")


def test_run_that_cannot_be_begun_is_reported_once(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "environment", lambda: 1 / 0)
        with tracked(stage) as run:
            run.metrics({"loss": 1.0})
    assert capsys.readouterr().err.count("warning:") == 1


def test_commit_and_changes_are_those_that_the_stage_began_with(stage: Stage) -> None:
    code = Path("pipeline/code.py")
    code.write_text("at the start\n")
    try:
        with tracked(stage):
            code.write_text("edited later\n")
    finally:
        code.unlink()
    (run,) = MlflowClient(client_module.store_uri()).search_runs(["1", "2"])
    diff = Path(run.info.artifact_uri.removeprefix("file://"), "git.diff").read_text()
    assert run.data.tags["git.dirty"] == "true"
    assert "+at the start" in diff
    assert "edited later" not in diff


def test_other_bytes_of_a_later_attempt_get_a_run_of_their_own(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracked(stage) as run:
        write_all(run)
    first = contents()["tags"][OUTS_TAG]
    with tracked(Stage("train")) as run:
        next(sample_system(run.folder))
        write_all(run, weights="other")
    assert "an earlier attempt wrote other bytes" in capsys.readouterr().err
    found = contents()
    assert found["tags"][OUTS_TAG] != first
    assert "system/cpu_utilization_percentage" in found["points"]
    assert found["profile"] == "quantity,value\n"
    assert found["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]


def test_refused_result_leaves_the_run_of_an_earlier_attempt(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    with tracked(stage) as run:
        write_all(run)
    first = contents()

    def run_on_touched_data() -> None:
        with tracked(Stage("train")) as run:
            write_all(run, weights="other")
            os.utime("data/words.txt")

    with pytest.raises(UserError, match=r"^data/words\.txt was written while train ran"):
        run_on_touched_data()
    assert "a new run replaces its run" not in capsys.readouterr().err
    assert contents()["status"] == "FINISHED"
    assert contents()["tags"][OUTS_TAG] == first["tags"][OUTS_TAG]


def test_only_a_server_has_a_limit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    monkeypatch.setattr(LoggerInProcess, "wait", lambda _, seconds: limits.append(seconds) or True)
    with tracked(stage):
        pass
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD_SERVER)
    with tracked(stage):
        pass
    assert limits == [None, stage.runtime.tracking_seconds]


HANGS = f"import pathlib, sys, time; pathlib.Path(input(), {READY!r}).touch(); time.sleep(600)"
Start = Callable[[str], LoggerProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Returns a function that starts a program in the place of the logger."""
    started: list[LoggerProcess] = []

    def start(program: str) -> LoggerProcess:
        (tmp_path / "program.py").write_text(program)
        started.append(LoggerProcess())
        started[-1].follow(tmp_path)
        return started[-1]

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(journal, "_LOGGER", "program")
    yield start
    for process in started:
        process.close()
        assert not psutil.pid_exists(process._process.pid), "no process is left, not even as a zombie"


def test_hanging_logger_costs_the_limit_and_one_warning(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert not start(HANGS).wait(0.2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no response within 0.2 s, `runtime.tracking_seconds`" in line


def test_time_of_imports_does_not_count_as_waiting(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("import time; time.sleep(0.5)").wait(0.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("program", [HANGS, "import time; time.sleep(600)"])
def test_request_to_stop_lowers_the_limit(
    program: str, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_HURRIED_SECONDS", 0.1)
    process = start(program)
    threading.Timer(0.2, process.hurry).start()
    assert not process.wait(600.0)
    assert "no response within " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("pass", ""),
        (f"raise SystemExit({REPORTED})", ""),
        ("raise SystemExit(1)", "ended with status 1"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
def test_ended_logger_is_a_warning_unless_it_reported_why(
    program: str, message: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(program).wait(None) == (program == "pass")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(message)
    assert not message or (message in lines[0] and "`gradtrail sync` completes this run later" in lines[0])


STAGE = """
import time
from gradtrail.tracking.journal import LoggerProcess
print(LoggerProcess()._process.pid, flush=True)
time.sleep(600)
"""


def test_logger_ends_with_a_killed_stage() -> None:
    stage = subprocess.Popen([sys.executable, "-c", STAGE], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(int((stage.stdout or sys.stdin).readline()))
    assert os.getsid(process.pid) != os.getsid(stage.pid), "Ctrl-C reaches the stage alone"
    stage.send_signal(signal.SIGKILL)
    stage.communicate()
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_system_metrics_are_few_and_have_a_step_each(tmp_path: Path) -> None:
    samples = sample_system(tmp_path)
    for _ in range(2):
        next(samples)
    events = [json.loads(line) for line in (tmp_path / logger.SYSTEM).read_text().splitlines()]
    assert [event["points"]["system/cpu_utilization_percentage"][0][0] for event in events] == [0, 1]
    names = {f"system/{name}" for name in logger.SYSTEM_METRICS}
    assert all(event["points"].keys() <= names for event in events)


def test_checkpoint_is_an_artifact(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradtrail.tracking import checkpoints

    def save(folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "state").write_text("state")

    monkeypatch.setattr(checkpoints, "save_checkpoint", save)
    with tracked(stage) as run:
        run.checkpoint(SimpleNamespace(), {})  # type: ignore[arg-type]
    assert "checkpoint/state" in contents()["files"]
