"""Faults that a person can correct: one line on stderr, exit status 2, no traceback."""

import difflib
import errno
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from typing import TypeVar

from gradtrail.support.secrets import redacted

T = TypeVar("T")
NO_SOURCE_FLAG = (
    "GRADTRAIL_NO_SOURCE_FLAG"  # variable: path of a file that `fetch` creates when it raises NoSourceError
)
_DAMAGE = ("file is not a database", "database disk image is malformed")  # words of SQLite's messages, in any exception
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ENVIRONMENT = (
    *FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # closed
    *(errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENAMETOOLONG),
)
# What MLflow's client raises: its own errors and those of its databases, its HTTP client and its artifact stores.
_STORE_LIBRARIES = {"mlflow", "sqlalchemy", "alembic", "requests", "urllib3", "botocore", "boto3", "azure", "google"}


class UserError(Exception):
    """Bad input. The message is one line: the key or file, its value, and the allowed values."""

    def __init__(self, message: str) -> None:
        """Join the lines of `message`, hide credentials, and escape control characters, which keys of YAML may hold."""
        super().__init__(printable(redacted(" ".join(message.splitlines()))))


class DamagedDatabaseError(UserError):
    """MLflow's database is not a readable SQLite database."""

    def __init__(self) -> None:
        """Write the message, with the remedy."""
        super().__init__(
            "mlflow.db: damaged, not readable as an SQLite database; "
            "`gradtrail sync --yes` renames it and creates a new one, with the runs of all outputs that are there"
        )


class NoSourceError(UserError):
    """No source of the data set responded; the message has the remedy."""


def environment_error(fault: Exception) -> str:
    """Return one line for a fault of the machine, such as disk, permission or memory; empty for other faults."""
    if isinstance(fault, shutil.Error) and isinstance(fault.args[0], list):  # (source, target, reason) of copied files
        _, target, reason = fault.args[0][0]
        number = re.match(r"\[Errno (\d+)\]", reason)
        return f"{target}: {reason.partition(': ')[0]}" if number and int(number[1]) in _ENVIRONMENT else ""
    if isinstance(fault, OSError) and fault.errno in _ENVIRONMENT:
        return f"{fault.filename or 'a file'}: {fault.strerror}"
    if isinstance(fault, MemoryError) or "RESOURCE_EXHAUSTED" in str(fault):
        return f"memory is too small ({one_line(fault)[:120]}); a smaller batch_size or model takes less"
    return ""


def one_line(fault: object) -> str:
    """Return the message of a fault as one line."""
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


def is_store_fault(fault: BaseException) -> bool:
    """Whether a fault is one of MLflow's store or of the system; any other is a bug of this project.

    Decided by the library that defines the exception, so that MLflow is not imported.
    """
    if isinstance(fault, OSError | sqlite3.Error | MemoryError):
        return True
    return any(kind.__module__.partition(".")[0] in _STORE_LIBRARIES for kind in type(fault).__mro__)


def _file_error(fault: Exception) -> str:
    """Return one line for a fault of a file; empty for other faults."""
    if isinstance(fault, OSError) and fault.filename and fault.strerror:
        return f"{fault.filename}: {fault.strerror}"
    return ""


def with_store(action: Callable[[], T]) -> T:
    """Return the result of an action on MLflow's store.

    Raises:
        UserError: The store or the system failed; one line.
        Exception: Any other fault, a bug of this project, as it was raised.
    """
    try:
        return action()
    except UserError:
        raise
    except Exception as error:
        if not is_store_fault(error):
            raise
        if any(sign in str(error) for sign in _DAMAGE):
            raise DamagedDatabaseError from error
        message = environment_error(error) or _file_error(error) or f"MLflow's store failed: {one_line(error)[:200]}"
        raise UserError(message) from error
