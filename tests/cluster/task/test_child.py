"""The process that runs an experiment: what it asks of DVC, and what it says where files cannot be pushed."""

import json
import logging
from collections.abc import Callable
from typing import Any

import dvc.cli
import dvc.repo
import pytest
from dvc.exceptions import DvcException

from gradtrail.cluster.task import child
from gradtrail.cluster.task.child import Orders

ORDERS = Orders(
    name="gradtrail-1",
    ref="refs/exps/x",
    options=["-S", "train.seed=1"],
    stage="evaluate",
    pull=False,
    push=True,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What DVC is asked to do, in place of doing it."""
    calls: list[Any] = []
    monkeypatch.setattr(dvc.cli, "main", lambda words: calls.append(words) or 0)
    monkeypatch.setattr("gradtrail.support.git.git", lambda *_: "0123")
    pushing(monkeypatch, lambda **how: calls.append(how))
    return calls


def pushing(monkeypatch: pytest.MonkeyPatch, push: Callable[..., Any]) -> None:
    class FakeRepo:
        def __enter__(self) -> "FakeRepo":
            return self

        def __exit__(self, *_: object) -> None: ...

    FakeRepo.push = lambda _, **how: push(**how)  # type: ignore[attr-defined]
    monkeypatch.setattr(dvc.repo, "Repo", FakeRepo)


def test_orders_go_through_the_command_line() -> None:
    _, _, module, orders = ORDERS.command
    assert module == "gradtrail.cluster.task.child"
    assert Orders(**json.loads(orders)) == ORDERS


def test_it_runs_in_a_copy_and_pushes_the_files_and_the_run_cache(asked: list[Any]) -> None:
    assert child.main(ORDERS) == 0
    run = ["exp", "run", "--temp", "--name", "gradtrail-1", "-S", "train.seed=1", "evaluate"]
    assert asked == [run, {"revs": ["0123"], "workspace": False, "run_cache": True}]


def test_where_dvc_fails_nothing_is_pushed(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dvc.cli, "main", lambda _: 255)
    assert child.main(ORDERS) == 255
    assert asked == []


def test_an_experiment_that_is_the_commit_itself_has_nothing_to_push(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradtrail.support.git.git", lambda *_: "")
    assert child.main(ORDERS) == 0
    assert len(asked) == 1


def test_a_full_remote_is_one_line_that_says_so(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: Any) -> None:
        logging.getLogger("dvc_objects").error("failed to transfer 'md5: 01': QuotaExceeded")
        raise DvcException("2 files failed to upload")

    pushing(monkeypatch, full)
    assert child.main(ORDERS) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ERROR: the files were not pushed: 2 files failed to upload; failed to transfer 'md5: 01'")
    assert last.endswith("QuotaExceeded")
