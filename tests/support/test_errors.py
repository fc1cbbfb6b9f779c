"""Faults of MLflow's store and of the system are one line without credentials; a bug of ours stays what it is."""

import errno
import re
import shutil
import sqlite3
from typing import NoReturn

import pytest
import requests
import sqlalchemy.exc
from filelock import Timeout
from mlflow.exceptions import MlflowException
from urllib3.exceptions import MaxRetryError

from gradtrail.support.errors import UserError, redacted, suggestion, with_store

STORE_FAULTS = [
    MlflowException("down"),
    sqlalchemy.exc.OperationalError("select", {}, Exception("locked")),
    sqlite3.DatabaseError("malformed"),
    requests.ConnectionError("refused"),
    MaxRetryError(None, "http://127.0.0.1:9"),  # type: ignore[arg-type]
    OSError("gone"),
    Timeout("store.lock"),
]


def raise_in_store(fault: Exception) -> None:
    def action() -> NoReturn:
        raise fault

    with_store(action)


@pytest.mark.parametrize("fault", STORE_FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_fault_of_the_store_is_one_line(fault: Exception) -> None:
    with pytest.raises(UserError, match=r"^MLflow's store failed: [^\n]*$"):
        raise_in_store(fault)


@pytest.mark.parametrize("bug", [KeyError("params"), BrokenPipeError()])
def test_a_bug_or_closed_pipe_is_raised_as_it_is(bug: Exception) -> None:
    with pytest.raises(type(bug)) as caught:
        raise_in_store(bug)
    assert caught.value is bug


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "/x: No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/y"), "/y: No such file"),
        (shutil.Error([("/a", "/b", "[Errno 28] No space left on device: '/b'")]), "/b: [Errno 28] No space left on"),
        (shutil.Error([*"same file"]), "MLflow's store failed: "),  # of a copy of a folder onto itself
        (sqlite3.DatabaseError("file is not a database"), "mlflow.db is damaged; move "),
        (UserError("bad input"), "bad input"),
    ],
)
def test_fault_of_the_machine_is_named(fault: Exception, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        raise_in_store(fault)


def test_control_characters_of_an_error_are_escaped() -> None:
    assert str(UserError("run \x1b[31mred\r\nof é, 数 and \udcff")) == r"run \x1b[31mred of é, 数 and \udcff"


def test_the_nearest_known_name_is_suggested_if_one_is_near() -> None:
    assert suggestion("sed", ["model", "seed", "epochs"]) == "; did you mean 'seed'?"
    assert not suggestion("zzz", ["model", "seed", "epochs"])


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "MLFLOW_TRACKING_PASSWORD": "correct horse",
    "GITHUB_TOKEN": "ghp_0123456789",
    "OLD_TOKEN": "ghp_01234",  # a part of another
    "DB_PASSWORD": "abc",  # shorter than what can be told from a word
    "TOKENIZERS": "parallelism",
    "MONKEY": "bananas",
    "HOME": "/home/ann",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("signed with wJalrXUtnFEMI!", "signed with ***!"),
        ("'correct horse' is wrong", "'***' is wrong"),
        ("https://ann:ghp_0123456789@host/x.git", "https://***@host/x.git"),
        ("postgresql+psycopg2://ann:hunter2@db:5432/mlflow failed", "postgresql+psycopg2://***@db:5432/mlflow failed"),
        ("https://onlyatoken@host/x.git", "https://***@host/x.git"),
        ("http://a:b@one and http://c:d@two", "http://***@one and http://***@two"),
        ("ssh://git@host/x.git", "ssh://git@host/x.git"),
        ("git@host:x.git", "git@host:x.git"),
        ("s3://bucket/path@2", "s3://bucket/path@2"),
        ("http://host:5000/a?b=c@d", "http://host:5000/a?b=c@d"),
        ("abc, parallelism and bananas in /home/ann", "abc, parallelism and bananas in /home/ann"),
    ],
)
def test_credentials_are_hidden_and_nothing_else(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert redacted(text) == str(UserError(text)) == message
