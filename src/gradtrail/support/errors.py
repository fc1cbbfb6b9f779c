"""Faults that a person can mend: reported as one line on stderr, with exit status 2, without a traceback."""

import errno
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_GROUND = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # closed
    *(errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.EMFILE, errno.ENAMETOOLONG),
)


class UserError(Exception):
    """Bad input. The message is one line: the key or file, what was found, and what is allowed."""

    def __init__(self, message: str) -> None:
        """Join the lines of `message`: a path or a key of untrusted YAML may hold line breaks."""
        super().__init__(" ".join(message.splitlines()))


class NoSourceError(UserError):
    """No source of the data set answered; the message says what to do."""


def environment_error(fault: Exception) -> str:
    """Return in one line what the machine refused, such as disk, permission or memory; nothing for other faults."""
    if isinstance(fault, OSError) and fault.errno in _GROUND:
        return f"{fault.filename or 'a file'}: {fault.strerror}"
    if isinstance(fault, MemoryError) or "RESOURCE_EXHAUSTED" in str(fault):
        return f"memory is too small ({one_line(fault)[:120]}); a smaller batch_size or model takes less"
    return ""


def one_line(fault: object) -> str:
    """Return what a fault says, as one line."""
    return " ".join(str(fault).split())


def with_store(action: Callable[[], T]) -> T:
    """Return what an action on MLflow's store returns; whatever the store does to it is one line, as a UserError."""
    try:
        return action()
    except UserError:
        raise
    except Exception as error:  # whatever the store does
        if said := environment_error(error):
            raise UserError(said) from error
        raise UserError(f"MLflow's store failed: {one_line(error)[:200]}") from error
