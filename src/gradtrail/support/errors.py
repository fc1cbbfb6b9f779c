"""Faults that a person can correct: one line on stderr, exit status 2, no traceback.

A line hides credentials: passwords in addresses, and the values of variables with names of secrets.
"""

import difflib
import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
NO_SOURCE_FLAG = "GRADTRAIL_NO_SOURCE_FLAG"  # variable: file that `fetch` creates when it raises NoSourceError
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_ENVIRONMENT = {*FULL, *_CLOSED, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENAMETOOLONG}
_DAMAGE = ("file is not a database", "database disk image is malformed")  # words of SQLite's messages, in any exception
# Defining packages of what MLflow's client raises: its own, its databases, its HTTP client, its artifact stores
_STORE_LIBRARIES = {"mlflow", "sqlalchemy", "alembic", "requests", "urllib3", "botocore", "boto3", "azure", "google"}

HIDDEN = "***"
_USER = r"[^/@\s'\"]"
_IN_ADDRESS = re.compile(rf"(?<=://){_USER}*:{_USER}*@|(?<=http://){_USER}+@|(?<=https://){_USER}+@")  # or a token
_SECRET_NAME = re.compile(r"(^|_)(PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|CREDENTIALS?|ACCESS_KEY|API_KEY)(_|$)")
_MIN_SECRET = 6  # characters; shorter values may be parts of ordinary words


def redacted(text: str) -> str:
    """Return a text without the passwords of addresses and the values of secret environment variables."""
    secrets = {value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(f"{HIDDEN}@", text)


def has_password(address: str) -> bool:
    """Whether an address, such as that of a git remote or a server, contains a password or a token."""
    return _IN_ADDRESS.search(address) is not None


class UserError(Exception):
    """Bad input. The message is one line: the key or file, its value, and the allowed values."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(redacted(" ".join(message.splitlines()))))


class NoSourceError(UserError):
    """No source of the data set responded; the message has the remedy."""


def one_line(fault: object) -> str:
    return " ".join(str(fault).split())


def printable(text: str) -> str:
    """Return text from outside, such as the name of a run, with control characters escaped."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'seed'?` for the nearest of some names; empty if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def environment_error(fault: Exception) -> str:
    """Return one line for a fault of the machine, such as disk, permission or memory; empty for other faults."""
    if isinstance(fault, shutil.Error) and isinstance(fault.args[0][0], tuple):  # (source, target, reason) of files
        _, target, reason = fault.args[0][0]
        return f"{target}: {reason.partition(': ')[0]}"
    if isinstance(fault, OSError) and fault.errno in _ENVIRONMENT:
        return f"{fault.filename or 'a file'}: {fault.strerror}"
    if isinstance(fault, MemoryError) or "RESOURCE_EXHAUSTED" in str(fault):
        return f"memory is too small ({one_line(fault)[:120]}); a smaller batch_size or model takes less"
    return ""


def is_store_fault(fault: BaseException) -> bool:
    """Whether a fault is one of MLflow's store or of the system; any other is a bug of this project.

    Decided by the package that defines the exception, so that MLflow is not imported.
    """
    if isinstance(fault, OSError | sqlite3.Error | MemoryError):
        return True
    return any(kind.__module__.partition(".")[0] in _STORE_LIBRARIES for kind in type(fault).__mro__)


def with_store(action: Callable[[], T]) -> T:
    """Return the result of an action on MLflow's store; a fault of the store or the system is a UserError."""
    try:
        return action()
    except (UserError, BrokenPipeError):  # a broken pipe: `head` or a pager has read enough
        raise
    except Exception as error:
        if not is_store_fault(error):
            raise
        message = environment_error(error) or f"MLflow's store failed: {one_line(error)[:200]}"
        if isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{error.filename}: {error.strerror}"
        elif any(sign in str(error) for sign in _DAMAGE):
            message = "mlflow.db is damaged; move mlflow.db* away, and `gradtrail sync` makes a new one, with its runs"
        raise UserError(message) from error
