"""No credential in a message: neither in an address nor the value of a secret variable."""

import pytest

from gradtrail.support.errors import UserError
from gradtrail.support.secrets import has_password, redacted

ENVIRON = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "MLFLOW_TRACKING_PASSWORD": "correct horse",
    "GITHUB_TOKEN": "ghp_0123456789",
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
def test_credentials_are_hidden_and_nothing_else(text: str, message: str) -> None:
    assert redacted(text, ENVIRON) == message


def test_a_secret_that_contains_another_is_hidden_whole() -> None:
    assert redacted("abcdefgh", {"A_TOKEN": "abcdef", "B_TOKEN": "abcdefgh"}) == "***"


def test_which_addresses_hold_a_password() -> None:
    assert has_password("https://ann:secret@host/x.git")
    assert has_password("https://token@host/x.git")
    assert not has_password("ssh://git@host/x.git")
    assert not has_password("git@host:x.git")


def test_an_error_shows_no_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    error = UserError("https://ann:secret@host said no to wJalrXUtnFEMI")
    assert str(error) == "https://***@host said no to ***"
