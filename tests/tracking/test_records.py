"""Whatever befalls the store, the shipper or the stage: the work goes on, and the run has all that the record says."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from projects import Project
from small_project import make_small_project

from gradtrail.stages.common import stage as stage_module
from gradtrail.stages.common.stage import Stage
from gradtrail.support.errors import UserError
from gradtrail.tracking import __main__ as shipper_process
from gradtrail.tracking import live, record, render, shipper, store
from gradtrail.tracking.live import LiveRun, tracked
from gradtrail.tracking.names import metric_name
from gradtrail.tracking.record import RUN, Record, all_records, records_folder, take_notices
from gradtrail.tracking.shipper import Shipper, ship_records
from gradtrail.tracking.store import StoreClient, open_store, store_uri
from gradtrail.tracking.tags import BEGAN, NOTE, PROCESS, START
from gradtrail.tracking.tags import OUTS as OUTS_TAG

DEAD_SERVER = "http://127.0.0.1:9"
REQUESTS = (
    *("create_run", "log_batch", "log_text", "log_artifact", "log_artifacts", "log_inputs", "set_tag"),
    *("set_terminated", "update_run"),
)
OUTS = ["models/final.safetensors", "results/metrics/train.json"]
DEAD_PROCESS = f"{os.uname().nodename}:4194305:no boot:0"
GONE = ConnectionError("the server\nis gone")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_small_project(tmp_path_factory.mktemp("project") / "project")
    (project.folder / "data").mkdir()
    (project.folder / "data/words.txt").write_text("words")
    return project


@pytest.fixture
def stage(project: Project, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The stage `train` in a folder whose store has no runs, and which has no shipper."""
    monkeypatch.chdir(project.folder)
    use_new_store(monkeypatch)
    monkeypatch.setattr(live, "ensure_shipper", lambda: None)
    monkeypatch.setattr(stage_module, "seconds_running", lambda: 0.0)  # a stage refuses code younger than its process
    for left in all_records():
        left.remove()
    take_notices()
    return Stage("train")


def use_new_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a store without runs, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir="."), "mlflow.db").resolve().parent
    Project(folder).empty_store()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")


def write_all(run: LiveRun, weights: str = "weights", seconds: float = 2.0) -> None:
    """Do what a stage does, with everything that a record has."""
    for epoch in range(3):
        run.curves({"train/loss": {epoch: 1.0 / (1 + epoch)}, "train/elapsed_seconds": {epoch: epoch}})
        run.alert(f"stalled: {epoch}")
    run.metrics({"seconds": seconds, "compile/total_seconds": 1.0})
    Path("profile").mkdir(exist_ok=True)
    Path("profile/table.csv").write_text("quantity,value\n")
    run.files(Path("profile"), "compile")
    Path("profile/table.csv").write_text("written over")
    run.timings(classes=10)
    Path("models").mkdir(exist_ok=True)
    Path("models/final.safetensors").write_text(weights)
    about = {"dataset": "words", "dataset_digest": "0" * 64, "loss": 2, "validation_accuracy": 0.5}
    Path("results/metrics").mkdir(parents=True, exist_ok=True)
    Path("results/metrics/train.json").write_text(json.dumps(about))
    Path("results/train").mkdir(exist_ok=True)
    Path("results/train/start.json").write_text(json.dumps({"md5": "0" * 32}))
    run.outs()


def execute(**options: Any) -> None:
    """Run the stage as a whole."""
    with tracked(Stage("train")) as run:
        write_all(run, **options)


def contents() -> dict[str, Any]:
    """Return what the only run of the store has, except times and names of processes."""
    client = MlflowClient(store_uri())
    (run,) = client.search_runs(["1", "2"])
    is_time = re.compile("train/(goodput|seconds_)").match
    metrics = {name: value for name, value in run.data.metrics.items() if not is_time(name)}
    points = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in metrics
    }
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    timings = json.loads(files["timings.json"].read_text()) if "timings.json" in files else {}
    return {
        "status": run.info.status,
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if key not in (BEGAN, NOTE)},
        "metrics": metrics,
        "points": points,
        "files": sorted(files),
        "profile": files["compile/table.csv"].read_text() if "compile/table.csv" in files else "",
        "output": files["output.txt"].read_text() if "output.txt" in files else "",
        "timed": sorted(timings.get("seconds", {})),
        "times": (run.info.start_time, run.info.end_time),
    }


def change(place: Record, **changes: Any) -> None:
    """Change what a record says of its run, as another process would have written it."""
    info = place.read()
    place.write(dataclasses.replace(info, **changes | {"tags": info.tags | changes.get("tags", {}), "files": {}}))


def test_run_has_all_that_the_stage_wrote(stage: Stage) -> None:
    execute()
    assert ship_records() == ["train"]
    found = contents()
    assert found["status"] == "FINISHED"
    assert found["tags"][START] == "0" * 32
    assert found["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]
    assert found["points"][metric_name("train", "compile/total_seconds")] == [(0, 1.0)]
    assert found["profile"] == "quantity,value\n", "a file is logged as it was"
    assert sorted(json.loads(found["tags"][OUTS_TAG])) == OUTS
    assert found["tags"]["attempts"] == "1"
    assert found["tags"]["alert"] == "stalled: 0\nstalled: 1\nstalled: 2"
    assert {"imports", "other", "preparation", "tracking"} >= {*found["timed"]} >= {"tracking"}
    assert not [*all_records()]
    assert not [*records_folder().iterdir()]


def test_metric_with_a_curve_is_its_curve(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "read_curves", lambda *_: {"train/validation_accuracy": {1: 0.25, 2: 0.5}})
    execute()
    ship_records()
    assert contents()["points"]["train/validation_accuracy"] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize(
    ("fault", "status"), [(None, "FINISHED"), (ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_status_says_how_the_stage_ended(stage: Stage, fault: type[BaseException] | None, status: str) -> None:
    with pytest.raises(fault) if fault else contextlib.nullcontext(), tracked(stage) as run:
        run.curves({"train/loss": {0: 1.0}})
        if fault:
            raise fault
    ship_records()
    assert contents()["status"] == status
    assert contents()["points"] == {"train/loss": [(0, 1.0)]}


def test_what_the_stage_prints_is_an_artifact_as_a_terminal_shows_it(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "opensesame")

    def print_and_fail() -> None:
        with tracked(stage):
            print("1 %\r50 %\r\x1b[1m100 %\x1b[0m")
            print("opensesame", file=sys.stderr)
            raise ValueError("fault")

    with pytest.raises(ValueError, match="fault"):
        print_and_fail()
    ship_records()
    assert "1 %\r50 %" in capsys.readouterr().out
    first, second, *rest = contents()["output"].splitlines()
    assert (first, second) == ("100 %", "***")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: fault"


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


def test_shipping_that_breaks_at_any_request_is_completed_later(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the run of a shipping that did not break."""
    execute()
    with pytest.MonkeyPatch.context() as patch:
        requests = break_after(1000, GONE, patch)
        ship_records()
    expected, number = contents(), len(requests)
    assert number > 10
    for count in range(0, number, 1 if os.environ.get("NIGHTLY") else 3):
        use_new_store(monkeypatch)
        execute()
        with pytest.MonkeyPatch.context() as patch:
            break_after(count, GONE, patch)
            with pytest.raises(ConnectionError):
                ship_records()
        Path("models/final.safetensors").write_text("of another state")
        assert ship_records() == ["train"]
        found = contents()
        assert found | {"times": None} == expected | {"times": None}, count
        assert not [*all_records()]
    assert ship_records() == []


def test_shipper_ships_the_points_of_a_stage_that_works_and_closes_its_run(stage: Stage) -> None:
    with tracked(stage) as run:
        ship = Shipper(open_store())
        run.curves({"train/loss": {0: 1.0}})
        run._described.result()
        assert ship.turn()
        assert contents()["status"] == "RUNNING"
        assert contents()["points"]["train/loss"] == [(0, 1.0)]
        run.curves({"train/loss": {1: 0.5}})
        run.alert("stalled")
        ship.turn()
        assert contents()["points"]["train/loss"] == [(0, 1.0), (1, 0.5)]
        assert contents()["tags"]["alert"] == "stalled"
        write_all(run)
        assert ship_records() == [], "a stage at work is not for `gradtrail sync`"
    assert not ship.turn()
    assert contents()["status"] == "FINISHED"
    assert contents()["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]
    assert not [*all_records()]


def test_fault_of_the_shipper_is_told_once_by_the_next_command_and_stops_no_other_record(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    execute()
    ship = Shipper(open_store())
    with pytest.MonkeyPatch.context() as patch:
        break_after(2, GONE, patch)
        assert not ship.turn()
    capsys.readouterr()
    execute()
    assert capsys.readouterr().err.splitlines() == [
        "warning: MLflow's store failed (ConnectionError: the server is gone); the results are unaffected; "
        "`gradtrail sync` completes this run later"
    ]
    assert take_notices() == []
    ship.turn()
    assert [place.has_fault for place in all_records()] == [True], "the second record is in the store"
    assert ship_records() == ["train"]
    assert contents()["status"] == "FINISHED"
    assert contents()["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]


def begin_as_the_shipper_ends(monkeypatch: pytest.MonkeyPatch, begin: Callable[[], object]) -> None:
    """Let a stage begin in the last moment in which the shipper's lock is taken, so that it starts no other shipper."""

    class Lock(FileLock):
        def release(self, force: bool = False) -> None:
            if self.is_locked:
                begin()
            super().release(force)

    monkeypatch.setattr(shipper_process, "shipper_lock", lambda: Lock("shipper.lock"))
    monkeypatch.setattr(os, "nice", lambda increment: 0)


def test_stage_that_begins_while_a_failed_shipper_ends_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_as_the_shipper_ends(monkeypatch, execute)
    monkeypatch.setattr(store, "open_store", Mock(side_effect=GONE))
    shipper_process.main()
    assert [place.has_fault for place in all_records()] == [True]
    assert "the server is gone" in "".join(take_notices())


def test_shipper_goes_on_for_a_stage_that_begins_while_it_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_as_the_shipper_ends(monkeypatch, lambda: record.new_record("state"))  # it has not said what it is
    monkeypatch.setattr(shipper.Shipper, "serve", lambda self: None)
    monkeypatch.setattr(os, "execv", started := Mock())
    shipper_process.main()
    assert started.called


def test_record_of_another_store_is_left_to_sync(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    execute()
    use_new_store(monkeypatch)
    assert not Shipper(open_store()).turn()
    assert len([*all_records()]) == 1
    assert ship_records() == ["train"]


def test_shipper_starts_anew_where_another_database_is_in_the_place_of_its_own(stage: Stage) -> None:
    ship, path = Shipper(open_store()), Path(store_uri().removeprefix("sqlite:///"))
    path.rename(path.with_suffix(".moved"))
    Project(path.parent).empty_store()
    began = time.monotonic()
    ship.serve()
    assert time.monotonic() - began < 5, "of the ten for which it would wait for more"


def test_times_are_those_of_the_stage_if_the_store_was_down(stage: Stage) -> None:
    began = time.time()
    execute()
    ended = time.time()
    time.sleep(0.1)
    ship_records()
    assert all(began - 1 <= at / 1000 <= ended for at in contents()["times"])


def test_record_of_a_killed_stage_is_shipped_as_killed_and_the_next_attempt_continues_its_run(stage: Stage) -> None:
    execute()
    (killed,) = all_records()
    change(killed, status="RUNNING", ended=None, outs=None, tags={PROCESS: DEAD_PROCESS, OUTS_TAG: None})
    lines = (killed.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    torn = [line for line in lines if "train/loss" in line]
    (killed.folder / "metrics.jsonl").write_text("".join(torn[:2]) + torn[2][:9])
    assert ship_records() == ["train"]
    assert contents()["status"] == "KILLED"
    assert contents()["points"]["train/loss"] == [(0, 1.0), (1, 0.5)], "of the lines before the cut"
    execute()
    ship_records()
    assert contents()["status"] == "FINISHED"
    assert contents()["tags"]["attempts"] == "2"
    assert contents()["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]
    assert contents()["points"][metric_name("train", "compile/total_seconds")] == [(1, 1.0)], (
        "a point for each attempt that compiles"
    )


def test_record_that_was_only_begun_is_removed(stage: Stage) -> None:
    (records_folder() / "0123" / "1-4194305").mkdir(parents=True)
    assert ship_records() == []
    assert not [*all_records()]


def test_measured_metrics_and_the_start_are_those_of_the_last_attempt(stage: Stage) -> None:
    for seconds in (2.0, 3.0):
        began = time.time()
        execute(seconds=seconds)
        ship_records()
    (stored,) = MlflowClient(store_uri()).search_runs(["1", "2"])
    assert contents()["metrics"]["train/seconds"] == 3.0
    assert sorted(contents()["points"]["train/seconds"]) == [(0, 2.0), (1, 3.0)]
    assert stored.info.start_time / 1000 < began - 0.001 <= int(stored.data.tags[BEGAN]) / 1000
    assert {"timings.json", "timings-2.json", "environment-2.json"} <= {*contents()["files"]}


def test_record_that_another_process_ships_is_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    execute()
    (waiting,) = all_records()
    monkeypatch.setattr(shipper, "_LOCK_SECONDS", 0.0)
    monkeypatch.setattr(record, "FileLock", lambda path: FileLock(path, is_singleton=False))
    with record.shipping_lock(waiting.read().state):
        assert ship_records() == []
        assert waiting.folder.exists()
    assert ship_records() == ["train"]


def damaged(whole: bytes) -> Iterator[bytes]:
    """Yield a file as several kinds of damage leave it."""
    for place in range(0, len(whole), len(whole) // (40 if os.environ.get("NIGHTLY") else 8)):
        yield whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :]
    yield from (whole[: len(whole) // 2], b"", bytes(9), b"null\n")


def test_damaged_records_are_set_aside_with_a_warning_each_and_all_others_are_shipped(
    stage: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    execute()
    (whole,) = all_records()
    kept = whole.folder.rename(tmp_path / "kept")
    contents_of = {name: (kept / name).read_bytes() for name in (RUN, "metrics.jsonl", "artifacts/lineage.json")}
    damages = [(name, content) for name, content_of in contents_of.items() for content in damaged(content_of)]
    for number, (name, content) in enumerate(damages):
        bad = Path(shutil.copytree(kept, records_folder() / "0123" / f"{number:03}-1"))
        (bad / name).write_bytes(content)
    execute()
    capsys.readouterr()
    assert ship_records() == ["train"]
    warnings = capsys.readouterr().err.splitlines()
    assert ["set aside" in line for line in warnings] == [True] * len(damages)
    assert contents()["status"] == "FINISHED"
    assert not [*all_records()]


def test_damaged_record_leaves_the_finished_run_of_its_state_as_it_is(stage: Stage) -> None:
    execute()
    ship_records()
    execute()
    (bad,) = all_records()
    (bad.artifacts / "lineage.json").write_bytes(b"damaged")
    assert ship_records() == []
    assert contents()["status"] == "FINISHED"


def test_run_in_progress_elsewhere_is_not_joined_and_one_run_remains(stage: Stage) -> None:
    """Two clones that share a store work on one state: the second does not write into the curve of the first."""
    execute()
    (first,) = all_records()
    change(first, status="RUNNING", ended=None, outs=None, tags={PROCESS: "another host:1:a:1", OUTS_TAG: None})
    client = open_store()
    foreign = shipper.Shipment(client, first)
    foreign._ship_points()
    first.remove()
    execute()
    ship_records()
    runs = client.search_runs(["1", "2"])
    assert sorted(run.info.status for run in runs) == ["FINISHED", "RUNNING"]
    assert {run.data.tags["attempts"] for run in runs} == {"1"}
    outs = next(run.data.tags[OUTS_TAG] for run in runs if OUTS_TAG in run.data.tags)
    client.set_tag(foreign.run_id, OUTS_TAG, outs)  # the first one ends too
    client.set_terminated(foreign.run_id)
    execute()
    ship_records()
    (run,) = client.search_runs(["1", "2"])
    assert run.info.run_id == foreign.run_id, "the older one"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [0, 1, 2]


def test_closed_run_without_outs_gives_way_to_one_that_finished(stage: Stage) -> None:
    execute()
    (first,) = all_records()
    change(first, status="RUNNING", ended=None, outs=None, tags={PROCESS: "another host:1:a:1", OUTS_TAG: None})
    client = open_store()
    foreign = shipper.Shipment(client, first)
    first.remove()
    with tracked(Stage("train")) as run:
        ship = Shipper(client)
        run._described.result()
        ship.turn()
        client.set_terminated(foreign.run_id, "KILLED")
        write_all(run)
    ship.turn()
    assert contents()["status"] == "FINISHED"
    assert client.get_run(foreign.run_id).data.tags["replaced_by"]


def test_bug_in_the_stage_side_is_a_traceback_and_the_run_is_closed_as_failed(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracked(stage) as run:
        run.metrics({"accuracy": 1.0})
        run.checkpoint(None)  # type: ignore[arg-type]
        assert not run.is_open
        run.metrics({"loss": 1.0})
        run.outs()
    ship_records()
    assert contents()["status"] == "FAILED"
    assert list(contents()["points"]) == ["train/accuracy"]
    *traceback, line = capsys.readouterr().err.splitlines()
    assert traceback[0].startswith("Traceback")
    assert line.startswith("warning: logging to MLflow failed because of the bug above; the results are unaffected")


def test_commit_and_changes_are_those_that_the_stage_began_with(stage: Stage) -> None:
    code = Path("pipeline/code.py")
    code.write_text("at the start\n")
    try:
        with tracked(stage):
            code.write_text("edited later\n")
    finally:
        code.unlink()
    ship_records()
    (run,) = MlflowClient(store_uri()).search_runs(["1", "2"])
    diff = Path(run.info.artifact_uri.removeprefix("file://"), "git.diff").read_text()
    assert run.data.tags["git.dirty"] == "true"
    assert "+at the start" in diff
    assert "edited later" not in diff


def test_other_bytes_of_a_later_attempt_get_a_run_of_their_own(stage: Stage) -> None:
    execute()
    ship_records()
    first = contents()["tags"][OUTS_TAG]
    execute(weights="other")
    ship_records()
    assert ["an earlier attempt wrote other bytes" in notice for notice in take_notices()] == [True]
    found = contents()
    assert found["tags"][OUTS_TAG] != first
    assert found["profile"] == "quantity,value\n"
    assert found["points"]["train/loss"] == [(0, 1.0), (1, 0.5), (2, 0.3333)]


def test_refused_result_leaves_the_run_of_an_earlier_attempt(stage: Stage) -> None:
    execute()
    ship_records()
    first = contents()

    def run_on_touched_data() -> None:
        with tracked(Stage("train")) as run:
            write_all(run, weights="other")
            os.utime("data/words.txt")

    with pytest.raises(UserError, match=r"^data/words\.txt was written while train ran"):
        run_on_touched_data()
    ship_records()
    assert take_notices() == []
    assert contents()["status"] == "FINISHED"
    assert contents()["tags"][OUTS_TAG] == first["tags"][OUTS_TAG]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_server_is_waited_for_until_the_limit_or_a_request_to_stop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_stopped: bool
) -> None:
    seconds = 600.0 if is_stopped else 0.3
    monkeypatch.setattr(Stage, "runtime", dataclasses.replace(stage.runtime, tracking_seconds=seconds))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DEAD_SERVER)
    with tracked(stage) as run:
        if is_stopped:
            threading.Timer(0.3, run.hurry).start()
        began = time.monotonic()
    assert 0.2 <= time.monotonic() - began < 60
    assert ("no response within 0.3 s, `runtime.tracking_seconds`" in capsys.readouterr().err) != is_stopped


def test_use_of_processor_and_memory_is_sampled_with_a_step_each(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "runtime", dataclasses.replace(stage.runtime, system_metrics=True))
    for name in ("_SAMPLE_AFTER_SECONDS", "_SAMPLE_SECONDS"):
        monkeypatch.setattr(live, name, 0.01)
    monkeypatch.setattr(live.psutil, "cpu_percent", itertools.chain([0.0], itertools.repeat(50.0)).__next__)
    with tracked(stage) as run:
        place: Any = run._record
        while len(place.points()[0]) < 4:
            time.sleep(0.01)
    ship_records()
    points = contents()["points"]
    assert points["system/cpu_utilization_percentage"][:2] == [(0, 50.0), (1, 50.0)], "a process's first value is 0"
    assert all(0 < value < 1e7 for _, value in points["system/system_memory_usage_megabytes"])


def test_checkpoint_is_an_artifact(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradtrail.tracking import checkpoints

    def save(folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "state").write_text("state")

    monkeypatch.setattr(checkpoints, "save_checkpoint", save)
    with tracked(stage) as run:
        run.checkpoint(SimpleNamespace())  # type: ignore[arg-type]
    ship_records()
    assert "checkpoint/state" in contents()["files"]


def test_metric_that_mlflow_refuses_sets_its_record_aside(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    with tracked(stage) as run:
        run.curves({"a\nb": {0: 1.0}})
    capsys.readouterr()
    assert ship_records() == []
    assert "set aside, as it cannot be logged" in capsys.readouterr().err
    assert not [*all_records()]
