"""Promotion and rollback on a store: moves, refusals and their history; comparisons with the champion."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from factories import ROOT
from mlflow import MlflowClient
from mlflow.entities import Run
from postgres import postgres, why_no_postgres
from registered import LABELS, evaluation, training
from servers import tracking_server

from gradtrail.serving.candidate import find_candidate
from gradtrail.serving.registry import resolve, version_of
from gradtrail.serving.release.comparison import compare
from gradtrail.serving.release.history import Event, before, champions, events_of, versions_of
from gradtrail.serving.release.promote import promote
from gradtrail.serving.release.rollback import rollback
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict.main import verdict_tag
from gradtrail.support.errors import UserError
from gradtrail.tracking.store import open_store

RIGHT = LABELS.copy()
NAME = "digits"


def judge(client: MlflowClient, run: Run, verdict: str) -> None:
    Path("deploy").mkdir(exist_ok=True)
    shutil.copy(ROOT / "deploy/slo.yaml", "deploy")
    candidate = find_candidate(run.info.run_id, client)
    if verdict:
        tag = verdict_tag(verdict, candidate.digest, read_slo().limits.digest)
        client.set_tag(run.info.run_id, "verdict", tag)


def crown(run: Run, *, force: bool = False, reason: str = "") -> int:
    return promote(run.info.run_id, as_champion=True, is_forced=force, reason=reason)


def champion() -> str | None:
    return version_of(NAME, "champion")


def events(client: MlflowClient) -> list[Event]:
    return events_of(versions_of(client, NAME))


@pytest.fixture
def model(client: MlflowClient, exported: Callable[[int], Path]) -> Callable[..., Run]:
    """Makes an evaluated training with an export, predictions and a verdict."""

    def make(seed: int, *, wrong: int = 5, verdict: str = "pass", first: int = 0) -> Run:
        run = training(client, seed=seed, export=exported(seed % 4))
        predicted = RIGHT.copy()
        predicted[first : first + wrong] = (predicted[first : first + wrong] + 1) % 10
        evaluation(client, run, predicted)
        judge(client, run, verdict)
        return run

    return make


def test_export_is_registered_once_and_becomes_challenger_then_champion(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    run = model(0)
    for _ in range(2):
        assert promote(run.info.run_id, as_champion=False, is_forced=False, reason="") == 0
    assert len(versions_of(client, NAME)) == 1
    assert (version_of(NAME, "challenger"), champion()) == ("1", None)
    assert crown(run) == 0
    assert (version_of(NAME, "challenger"), champion()) == (None, "1")
    assert crown(run) == 0
    assert "is already champion" in capsys.readouterr().out
    assert len(events(client)) == 1
    version = client.get_model_version(NAME, "1")
    assert version.run_id == run.info.run_id
    assert {"promoted_at", "promoted_by", "replaced", "export_digest"} <= version.tags.keys()


def test_rollback_goes_back_step_by_step_and_forward_again(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    runs = [model(seed) for seed in range(3)]
    for run in (runs[0], runs[1], runs[2], runs[0]):  # 1, 2, 3, 1
        assert crown(run, reason="a try") == 0
    champions_after = []
    for _ in range(3):
        assert rollback("it was slow") == 0
        champions_after.append(champion())
    assert champions_after == ["3", "2", "1"]
    with pytest.raises(UserError, match="version 1 is champion, and the history has none before it"):
        rollback("")
    assert crown(runs[2]) == 0
    assert rollback("") == 0
    assert champion() == "1"
    moves = [(event.kind, event.version, event.replaced) for event in events(client)]
    assert moves[4] == ("rolled back", "3", "1")
    assert all(event.is_done for event in events(client))
    assert "it was slow" in client.get_model_version(NAME, "2").tags["rolled_back"]


@pytest.mark.parametrize("verdict", ["", "fail"])
def test_champion_needs_a_verdict_that_passes(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture, verdict: str
):
    run = model(0, verdict=verdict)
    assert crown(run) == 1
    output = capsys.readouterr().out
    reason = "the verdict is fail" if verdict else f"run `gradtrail verdict {run.info.run_id[:8]}` first"
    assert reason in output
    assert "is registered as version 1 of 'digits', but 'champion' was not moved." in output
    assert champion() is None
    assert crown(run, force=True, reason="demo") == 0
    assert champion() == "1"
    tags = client.get_model_version(NAME, "1").tags
    assert "verdict" in tags["forced"]
    assert (tags["reason"], events(client)[0].forced) == ("demo", tags["forced"])


def test_verdict_of_another_export_does_not_count(client: MlflowClient, model: Callable[..., Run]):
    run = model(0)
    tag = client.get_run(run.info.run_id).data.tags["verdict"]
    client.set_tag(run.info.run_id, "verdict", f"pass: export {'0' * 64}, limits {tag[-64:]}")
    assert crown(run) == 1


def test_verdict_under_other_limits_does_not_count(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    run = model(0)
    limits = Path("deploy/slo.yaml").read_text()
    Path("deploy/slo.yaml").write_text(f"# another comment\n{limits}".replace("p99_ms_1: 10.0", "p99_ms_1: null"))
    assert crown(run) == 1
    assert (
        "the limits in deploy/slo.yaml changed after the verdict; run `gradtrail verdict` again"
        in capsys.readouterr().out
    )
    Path("deploy/slo.yaml").write_text(f"# another comment\n{limits}")
    assert crown(run) == 0


def test_tags_describe_only_the_last_promotion(client: MlflowClient, model: Callable[..., Run]):
    assert crown(model(0)) == 0
    run = model(1, verdict="")
    assert crown(run, force=True, reason="demo") == 0
    assert rollback("slow") == 0
    tags = client.get_model_version(NAME, "2").tags
    assert {"reason", "forced", "rolled_back"} <= tags.keys()
    judge(client, run, "pass")
    assert crown(run) == 0
    assert not {"reason", "forced", "rolled_back"} & client.get_model_version(NAME, "2").tags.keys()


def test_errors_are_one_line(client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture):
    def refused(action: Callable[[], object]) -> str:
        with pytest.raises(UserError) as error:
            action()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no such model in MLflow's registry" in refused(lambda: rollback(""))
    bare = training(client, seed=9)
    assert "has no exported model; `dvc repro export` makes it" in refused(lambda: crown(bare))
    assert "no run has this name" in refused(lambda: promote("mlq 0", as_champion=False, is_forced=False, reason=""))
    run = model(0)
    assert "--force: needs --champion" in refused(
        lambda: promote("mlp 0", as_champion=False, is_forced=True, reason="")
    )
    promote(run.info.run_id, as_champion=False, is_forced=False, reason="")
    assert "there is no champion; nothing to roll back to" in refused(lambda: rollback(""))
    Path("params.yaml").write_text("export: {name: letters, batch_sizes: [1]}\n")
    assert "was exported as digits" in refused(lambda: crown(run))
    Path("params.yaml").write_text("export: {name: digits, batch_sizes: [1]}\n")
    candidate = find_candidate(run.info.run_id, client)
    shutil.rmtree(candidate.export.folder)
    location = Path(client.get_logged_model(candidate.model_id).artifact_location.removeprefix("file://"))
    (location / "data/export/forward.cpu.bin").write_bytes(b"")
    assert "the download is damaged" in refused(lambda: crown(run))


def test_name_is_for_one_data_set(client: MlflowClient, model: Callable[..., Run]):
    first, other = model(0), model(1)
    client.set_tag(first.info.run_id, "dataset", "mnist")
    client.set_tag(other.info.run_id, "dataset", "idx")
    promote(first.info.run_id, as_champion=False, is_forced=False, reason="")
    with pytest.raises(
        UserError, match=r"^params\.yaml: export\.name: version 1 of digits was trained on mnist, .* on idx"
    ):
        promote(other.info.run_id, as_champion=False, is_forced=False, reason="")
    assert len(versions_of(client, NAME)) == 1
    client.delete_tag(first.info.run_id, "dataset")  # as of a run of another project
    assert promote(other.info.run_id, as_champion=False, is_forced=False, reason="") == 0


def test_rollback_skips_a_deleted_version(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    for seed in range(3):
        crown(model(seed))
    client.delete_model_version(NAME, "2")
    assert rollback("") == 0
    assert "skipped version 2, a former champion that was deleted" in capsys.readouterr().out
    assert champion() == "1"


def test_fresh_claim_blocks_and_a_stale_one_does_not(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    crown(model(0))
    run = model(1)
    promote(run.info.run_id, as_champion=False, is_forced=False, reason="")
    (done,) = events(client)
    claim = {"kind": "promoted", "replaced": "1", "by": "Ann", "reason": "", "forced": "", "is_done": False}
    key = "champion.000001.ffffffff"
    client.set_model_version_tag(NAME, "2", key, json.dumps(claim | {"time": done.time}))
    assert crown(run) == 1
    assert "Ann is moving champion to version 2" in capsys.readouterr().out
    assert [event.key for event in events(client)] == [done.key, key]  # its own claim is withdrawn
    client.set_model_version_tag(NAME, "2", key, json.dumps(claim | {"time": "2026-01-01T00:00:00+00:00"}))
    assert crown(run) == 0
    assert rollback("") == 0
    assert champion() == "1"


RACE = """
import sys, time
from pathlib import Path
from gradtrail.serving.release import history, promote
first = history._write
def after_the_other(client, name, event):  # both have read the history before either claims
    if not event.is_done:
        Path(sys.argv[1]).touch()
        while len(list(Path(".").glob("ready*"))) < 2:
            time.sleep(0.01)
    first(client, name, event)
history._write = after_the_other
sys.exit(promote.promote(sys.argv[2], as_champion=True, is_forced=False, reason=""))
"""


def race(runs: list[Run]) -> list[tuple[int, str]]:
    """Promote several runs concurrently, each in its own process; return status and output of each."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    commands = [[sys.executable, "-c", RACE, f"ready{number}", run.info.run_id] for number, run in enumerate(runs)]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_one_of_two_concurrent_promotions_is_refused(client: MlflowClient, model: Callable[..., Run]):
    assert crown(model(0)) == 0
    ended = race([model(1), model(2)])
    assert sorted(status for status, _ in ended) == [0, 1]
    ((_, lost),) = (result for result in ended if result[0] == 1)
    assert "Refused" in lost
    assert "moving champion" in lost or "was first" in lost or "somebody else moved" in lost
    last = events(client)[-1]
    assert (last.version, len(events(client))) == (champion(), 2)
    assert rollback("") == 0
    assert champion() == "1"


def test_history_is_a_stack():
    def event(number: int, version: str, kind: str = "promoted", *, is_done: bool = True) -> Event:
        fields = {"replaced": None, "time": "2026-01-01T00:00:00+00:00", "by": "", "reason": "", "forced": ""}
        return Event(sequence=number, token="0" * 8, version=version, kind=kind, is_done=is_done, **fields)

    moves = [event(1, "1"), event(2, "2"), event(3, "3"), event(4, "2", "rolled back"), event(5, "4", is_done=False)]
    assert champions(moves) == ["1", "2"]
    assert before(moves, "2") == "1"
    assert before(moves, "9") == "2"  # moved by hand
    assert before(moves[:1], "1") is None
    assert before([], None) is None


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_on_a_server(exported: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str):
    """Promotion, race, rollback and download through a tracking server."""
    if database == "postgresql" and (why := why_no_postgres()):
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    Path("params.yaml").write_text("export: {name: digits, batch_sizes: [1]}\n")
    address = postgres() if database == "postgresql" else contextlib.nullcontext("")
    with address as uri, tracking_server(tmp_path, uri) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        client = open_store()
        runs = [training(client, seed=seed, export=exported(seed)) for seed in range(3)]
        for run in runs:
            evaluation(client, run, RIGHT)
            judge(client, run, "pass")
        assert crown(runs[0]) == 0
        assert sorted(status for status, _ in race(runs[1:])) == [0, 1]
        assert resolve("models:/digits@champion").version == champion() != "1"
        assert rollback("") == 0
        assert resolve("models:/digits@champion").run_id == runs[0].info.run_id
        assert len(versions_of(client, NAME)) == 3


def test_worse_model_is_refused_and_one_that_differs_by_chance_is_not(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    good, unlucky, bad = model(0, wrong=2), model(1, wrong=6, first=1), model(2, wrong=12, first=0)
    assert crown(good) == 0
    assert crown(unlucky) == 0  # 5 lost, 1 gained: p = 0.22
    assert rollback("") == 0
    capsys.readouterr()
    assert crown(bad) == 1  # 10 lost, none gained: p = 0.002
    output = capsys.readouterr().out
    assert "worse than the champion on the test split: -5.00 [-5.00, -1.92] points of accuracy" in output
    assert "p = 0.00195 (0 gained, 10 lost of 200)" in output
    assert champion() == "1"


def test_other_test_splits_are_not_compared(
    client: MlflowClient, exported: Callable[[int], Path], model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    assert crown(model(0)) == 0
    for seed, options in ((1, {"dataset_digest": "1" * 12}), (2, {"labels": RIGHT[::-1].copy()})):
        run = training(client, seed=seed, export=exported(seed))
        evaluation(client, run, options.get("labels", RIGHT), **options)
        judge(client, run, "pass")
        assert crown(run) == 1
        assert "the test splits differ" in capsys.readouterr().out
    run = training(client, seed=3, export=exported(3))
    judge(client, run, "pass")
    assert crown(run) == 1
    assert "the model has no predictions of the test split" in capsys.readouterr().out


def test_examples_are_joined_by_their_ids(client: MlflowClient, model: Callable[..., Run]):
    """The same predictions in another order are the same predictions."""
    first, second = (find_candidate(model(seed, wrong=seed + 4).info.run_id, client) for seed in (0, 1))
    expected = compare(first, second).examples
    order = np.random.default_rng(0).permutation(len(RIGHT))
    second.predictions.table.loc[:] = second.predictions.table.iloc[order].to_numpy()
    assert compare(first, second).examples == expected


@pytest.mark.parametrize(("seeds", "is_paired"), [((0, 1, 2), True), ((7, 8, 9), False)])
def test_members_are_compared_over_their_seeds(
    client: MlflowClient, model: Callable[..., Run], seeds: tuple[int, ...], is_paired: bool, tmp_path: Path
):
    runs = [model(seed) for seed in (0, 1)]
    for run, numbers, accuracies in zip(
        runs, (seeds, (0, 1, 2)), ((0.91, 0.92, 0.93), (0.96, 0.971, 0.977)), strict=True
    ):
        path = tmp_path / "members.csv"
        rows = "".join(f"{seed},{value}\n" for seed, value in zip(numbers, accuracies, strict=True))
        path.write_text(f"seed,accuracy\n{rows}")
        candidate = find_candidate(run.info.run_id, client)
        client.log_artifact(candidate.evaluation.info.run_id, str(path), "results")
    comparison = compare(*(find_candidate(run.info.run_id, client) for run in runs))
    assert comparison.is_paired == is_paired
    assert comparison.seeds.mean == pytest.approx(-0.148 / 3)
    assert not comparison.examples.is_worse
    assert any("over its seeds" in reason for reason in comparison.worse)
    assert crown(runs[1]) == 0
    assert crown(runs[0]) == 1
