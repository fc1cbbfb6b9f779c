"""Promotion and rollback on a store: moves, refusals and their history; comparisons with the champion."""

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from factories import ROOT
from mlflow import MlflowClient
from mlflow.entities import Run
from model_store import LABELS, evaluation, training, write_export_params
from postgres import postgres, why_no_postgres
from servers import tracking_server

from gradtrail.serving import release
from gradtrail.serving.candidate import find_candidate
from gradtrail.serving.registry import resolve, version_of
from gradtrail.serving.release import (
    compare_seeds,
    move_champion,
    moves_of,
    promote,
    rollback,
    versions_of,
)
from gradtrail.serving.slo import read_slo
from gradtrail.serving.verdict import verdict_tag
from gradtrail.support.errors import UserError
from gradtrail.tracking.registry_history import keep_registry
from gradtrail.tracking.store import open_store

NAME, SLO = "digits", Path("deploy/slo.yaml")


def judge(client: MlflowClient, run: Run, outcome: str) -> None:
    SLO.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / SLO, SLO)
    if outcome:
        digest = find_candidate(run.info.run_id, client).export.digest
        client.set_tag(run.info.run_id, "verdict", verdict_tag(outcome, digest, read_slo().limits))


def crown(run: Run, *, force: bool = False, reason: str = "") -> int:
    return promote(run.info.run_id, as_champion=True, is_forced=force, reason=reason)


def crown_or_error(run: Run) -> str:
    try:
        return str(crown(run))
    except UserError as error:
        return str(error)


def challenge(run: Run) -> int:
    return promote(run.info.run_id, as_champion=False, is_forced=False, reason="")


def champion() -> str | None:
    return version_of(NAME, "champion")


@pytest.fixture
def model(client: MlflowClient, exported: Callable[[int], Path]) -> Callable[..., Run]:
    """Makes an evaluated training with an export, predictions and a verdict."""

    def make(seed: int, *, wrong: int = 5, verdict: str = "pass", first: int = 0) -> Run:
        run = training(client, seed=seed, export=exported(seed % 4))
        predicted = LABELS.copy()
        predicted[first : first + wrong] = (predicted[first : first + wrong] + 1) % 10
        evaluation(client, run, predicted)
        judge(client, run, verdict)
        return run

    return make


def test_export_is_registered_once_and_becomes_challenger_then_champion(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    run = model(0)
    assert challenge(run) == challenge(run) == 0
    assert len(versions_of(NAME)) == 1
    assert (version_of(NAME, "challenger"), champion()) == ("1", None)
    assert crown(run) == 0
    assert (version_of(NAME, "challenger"), champion()) == (None, "1")
    assert f"version 1 of {NAME} is champion: " in capsys.readouterr().out
    assert crown(run) == 0
    assert "is already champion" in capsys.readouterr().out
    assert len(moves_of(NAME)) == 1
    assert client.get_model_version(NAME, "1").run_id == run.info.run_id


@pytest.fixture
def move(client: MlflowClient) -> Callable[[str], None]:
    """Makes a version, of three without exports, the champion."""
    client.create_registered_model(NAME)
    for _ in range(3):
        client.create_model_version(NAME, "somewhere")
    return lambda version: move_champion(client, NAME, version, "promoted", replaced=champion(), reason="")


def test_rollback_goes_back_step_by_step_and_forward_again(
    client: MlflowClient,
    move: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    for version in "1231":
        move(version)
    champions = []
    for _ in range(3):
        assert rollback("it was slow") == 0
        champions.append(champion())
    assert f"version 1 of {NAME} is champion again, in place of version 2\n" in capsys.readouterr().out
    assert champions == ["3", "2", "1"]
    assert any("it was slow" in value for value in client.get_model_version(NAME, "2").tags.values())
    with pytest.raises(UserError, match="version 1 is champion, and the history has none before it"):
        rollback("")

    # Moved by hand: for a minute, it could be a promotion that is under way.
    move("3")
    client.set_registered_model_alias(NAME, "champion", "2")
    with pytest.raises(UserError, match="somebody else is moving champion; try again"):
        move("1")
    monkeypatch.setattr(release, "_STALE", timedelta())
    move("1")
    assert rollback("") == 0
    assert champion() == "3"

    # A former champion that was deleted is skipped.
    for version in "21":
        move(version)
    client.delete_model_version(NAME, "2")
    assert rollback("") == 0
    assert champion() == "3"


def test_champion_needs_a_verdict_that_passes_on_its_export_and_the_present_limits(
    client: MlflowClient, model: Callable[..., Run], capsys: pytest.CaptureFixture
):
    run = model(0)
    tag, limits = client.get_run(run.info.run_id).data.tags["verdict"], SLO.read_text()
    export = find_candidate(run.info.run_id, client).exported.info.run_id
    for verdict, reason in (
        ("", f"no verdict of this export; run `gradtrail verdict {export[:8]}` first"),
        (f"pass: export {'0' * 64}, limits {tag[-64:]}", "no verdict of this export"),
        (tag.replace("pass", "fail"), "the verdict is fail"),
    ):
        client.set_tag(run.info.run_id, "verdict", verdict)
        assert crown(run) == 1
        output = capsys.readouterr().out
        assert f"Refused: {reason}" in output
        assert "is registered as version 1 of 'digits', but 'champion' was not moved." in output
        assert champion() is None
    assert crown(run, force=True, reason="demo") == 0
    assert champion() == "1"
    (move,) = moves_of(NAME)
    recorded = client.get_model_version(NAME, "1").tags[move.key]
    assert "verdict" in recorded.partition('"forced"')[2]
    assert '"reason": "demo"' in recorded

    client.delete_registered_model_alias(NAME, "champion")
    client.delete_model_version_tag(NAME, "1", move.key)
    client.set_tag(run.info.run_id, "verdict", tag)
    SLO.write_text(limits.replace("p99_ms_1: 10.0", "p99_ms_1: null"))
    assert crown(run) == 1
    assert "the limits in deploy/slo.yaml changed after the verdict" in capsys.readouterr().out
    SLO.write_text(f"# another comment\n{limits}")
    assert crown(run) == 0


def test_registry_is_restored_in_a_new_database(
    client: MlflowClient,
    model: Callable[..., Run],
    exported: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [model(seed) for seed in range(3)]
    for run in runs:
        judge(client, run, "pass")
        assert challenge(run) == 0
    assert crown(runs[1], force=True) == 0
    assert crown(runs[2], force=True, reason="smaller") == 0
    client.delete_model_version(NAME, "1")
    for number in range(100):
        client.create_registered_model(f"another-{number}")
    keep_registry(client)
    moves, numbers = moves_of(NAME), [version.version for version in versions_of(NAME)]
    tags = [run.data.tags["verdict"] for run in map(client.get_run, (one.info.run_id for one in runs))]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new.db")
    new = open_store()
    keep_registry(new)
    assert f"warning: {NAME}: the export of champion is not here; `dvc fetch" in capsys.readouterr().err
    assert moves_of(NAME) == moves
    remade = [training(new, seed=seed, export=exported(seed)) for seed in range(3)]
    keep_registry(new)
    assert len(new.search_registered_models(max_results=1000)) == 101
    assert ([version.version for version in versions_of(NAME)], champion()) == (numbers, "3")
    assert moves_of(NAME) == moves
    assert [new.get_run(run.info.run_id).data.tags["verdict"] for run in remade] == tags
    assert resolve(f"models:/{NAME}@champion").run_id == remade[2].info.run_id
    assert rollback("") == 0
    assert champion() == "2"

    new.delete_registered_model(NAME)
    keep_registry(new)
    names = {registered.name for registered in new.search_registered_models(max_results=1000)}
    assert NAME not in names, "deleted by a person, not with the database"


def test_promotion_before_the_exports_are_here_forgets_no_version(
    client: MlflowClient,
    model: Callable[..., Run],
    exported: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert crown(model(0)) == 0
    keep_registry(client)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new.db")
    new = open_store()
    keep_registry(new)
    assert challenge(training(new, seed=1, export=exported(1))) == 0
    keep_registry(new)
    assert ({int(version.version) for version in versions_of(NAME)}, champion()) == ({1, 2}, "1")
    remade = training(new, seed=0, export=exported(0))
    keep_registry(new)
    assert resolve(f"models:/{NAME}@champion").run_id == remade.info.run_id
    assert "pass" in new.get_run(remade.info.run_id).data.tags["verdict"]


def test_errors_are_one_line(client: MlflowClient, model: Callable[..., Run]):
    def refused(action: Callable[[], object]) -> str:
        with pytest.raises(UserError) as error:
            action()
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no champion; nothing to roll back to" in refused(lambda: rollback(""))
    bare = training(client, seed=9)
    assert "no run of the stage export; `dvc repro export` or `gradtrail sync` makes it" in refused(lambda: crown(bare))
    run, other = model(0), model(1)
    forced = refused(lambda: promote("mlp 0", as_champion=False, is_forced=True, reason=""))
    assert "--force: needs --champion" in forced
    client.set_tag(run.info.run_id, "dataset", "mnist")
    client.set_tag(other.info.run_id, "dataset", "idx")
    challenge(run)
    assert "no champion; nothing to roll back to" in refused(lambda: rollback(""))
    assert "params.yaml: export.name: version 1 of digits was trained on mnist" in refused(lambda: challenge(other))
    write_export_params("letters")
    assert "was exported as digits" in refused(lambda: crown(run))
    export = find_candidate(run.info.run_id, client).export
    shutil.rmtree(export.folder)
    location = Path(client.get_logged_model(export.model_id).artifact_location.removeprefix("file://"))
    (location / "data/export/forward.cpu.bin").write_bytes(b"")
    assert "the download failed or is damaged" in refused(lambda: crown(run))


def test_of_two_promotions_at_once_one_is_refused_and_leaves_no_tag(
    client: MlflowClient, move: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another promotion is that far when this one, which has looked at the alias, writes its tag."""
    move("1")
    write, other = client.set_model_version_tag, "champion.000002.01234567"

    def write_after_the_other(name: str, version: str, key: str, value: str) -> None:
        write(name, "2", other, value)
        client.set_registered_model_alias(name, "champion", shown)
        write(name, version, key, value)

    monkeypatch.setattr(client, "set_model_version_tag", write_after_the_other)
    for shown in ("1", "2"):  # the other has its tag, or has moved the alias too
        with pytest.raises(UserError, match="somebody else is moving champion; try again"):
            move_champion(client, NAME, "3", "promoted", replaced="1", reason="")
        assert (champion(), [one.version for one in moves_of(NAME)]) == (shown, ["1", "2"])
        client.delete_model_version_tag(NAME, "2", other)
    shown = "1"
    monkeypatch.setattr(release, "_STALE", timedelta())  # the other was killed
    move_champion(client, NAME, "3", "promoted", replaced="1", reason="")
    assert (champion(), [one.version for one in moves_of(NAME)]) == ("3", ["1", "2", "3"])


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_on_a_server(exported: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str):
    """Promotion, race, rollback and download through a tracking server."""
    if database == "postgresql" and (why := why_no_postgres()):
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    write_export_params("digits")
    address = postgres() if database == "postgresql" else contextlib.nullcontext("")
    with address as uri, tracking_server(tmp_path, uri) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        client = open_store()
        runs = [training(client, seed=seed, export=exported(seed)) for seed in range(3)]
        for run in runs:
            evaluation(client, run, LABELS)
            judge(client, run, "pass")
        assert crown(runs[0]) == 0
        with ThreadPoolExecutor(2) as pool:
            results = [*pool.map(crown_or_error, runs[1:])]
        assert all("somebody else is moving champion" in result for result in results if result != "0")
        if "0" not in results:  # each saw the tag of the other
            assert [move.version for move in moves_of(NAME)] == ["1"]
            assert crown(runs[1]) == 0
        assert [move.version for move in moves_of(NAME)] == ["1", champion()]
        assert resolve("models:/digits@champion").version == champion() != "1"
        assert rollback("") == 0
        assert resolve("models:/digits@champion").run_id == runs[0].info.run_id


def test_worse_model_is_refused_and_one_that_differs_by_chance_is_not(
    model: Callable[..., Run], capsys: pytest.CaptureFixture
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
    for seed, options in ((1, {"dataset_digest": "1" * 12}), (2, {"labels": LABELS[::-1].copy()})):
        run = training(client, seed=seed, export=exported(seed))
        evaluation(client, run, options.get("labels", LABELS), **options)
        judge(client, run, "pass")
        assert crown(run) == 1
        assert "the test splits differ" in capsys.readouterr().out
    run = training(client, seed=3, export=exported(3))
    judge(client, run, "pass")
    assert crown(run) == 1
    assert "has no predictions of the test split" in capsys.readouterr().out


def test_members_are_compared_over_their_seeds(client: MlflowClient, model: Callable[..., Run]):
    """Also of other seeds, in place of the pairs."""
    worse, better, unpaired = model(0), model(1), model(2)
    for run, first, accuracies in (
        (worse, 0, (0.91, 0.92, 0.93)),
        (unpaired, 7, (0.91, 0.92, 0.93)),
        (better, 0, (0.96, 0.971, 0.977)),
    ):
        rows = "".join(f"{seed},{value}\n" for seed, value in enumerate(accuracies, first))
        evaluated = find_candidate(run.info.run_id, client).evaluation
        client.log_text(evaluated.info.run_id, f"seed,accuracy\n{rows}", "results/members.csv")
    assert crown(better) == 0
    champion = find_candidate(better.info.run_id, client)
    for run, test in ((worse, "paired t-test"), (unpaired, "Welch's t-test")):
        text, is_worse = compare_seeds(find_candidate(run.info.run_id, client), champion)
        assert f"seeds: {100 * -0.148 / 3:+.2f} [" in text
        assert f"points of accuracy, {test} p = 0.0" in text
        assert is_worse
        assert crown(run) == 1
