"""What the server answers instead of a prediction: a status and one line, without a path or a traceback."""

from collections.abc import Mapping

import orjson

from gradtrail.support.errors import one_line, printable

JSON = "application/json"
_LONGEST = 300  # characters of an error


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        message: one line, for whoever asked.
        headers: of the answer, such as Retry-After.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(one_line(message))[:_LONGEST]
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON that is sent: `{"error": "one line"}`."""
        return orjson.dumps({"error": self.message})


def busy(message: str) -> Refusal:
    """Return the refusal of a request that may be sent again after a second."""
    return Refusal(429, message, {"Retry-After": "1"})


def not_ready(message: str) -> Refusal:
    """Return the refusal of a request that another server, or this one a little later, can answer."""
    return Refusal(503, message, {"Retry-After": "1"})
