"""Faults that a person can mend: reported as one line on stderr, with exit status 2, without a traceback."""


class UserError(Exception):
    """Bad input. The message is one line: the key or file, what was found, and what is allowed."""


class NoSourceError(UserError):
    """No source of the data set answered; the message says what to do."""


def one_line(fault: object) -> str:
    """Return what a fault says, as one line."""
    return " ".join(str(fault).split())
