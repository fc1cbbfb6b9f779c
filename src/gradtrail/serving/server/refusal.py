"""What the server answers instead of a prediction: a status and one line, without a path or a traceback."""

from collections.abc import Mapping

import orjson

from gradtrail.support.errors import one_line, printable

JSON = "application/json"
_MAX_CHARS = 300  # of an error


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """An error answer, with its HTTP status, a message of one line and headers such as Retry-After."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(one_line(message))[:_MAX_CHARS]
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON body: `{"error": "one line"}`."""
        return orjson.dumps({"error": self.message})


def busy(message: str) -> Refusal:
    """Return the answer to a request that may be sent again after a second."""
    return Refusal(429, message, {"Retry-After": "1"})


def not_ready(message: str) -> Refusal:
    """Return the answer to a request that another server, or this one later, can answer."""
    return Refusal(503, message, {"Retry-After": "1"})
