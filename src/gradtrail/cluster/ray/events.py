"""What a job tells whoever follows it: lines in its log, one for each event, which a later follower reads as well."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from gradtrail.stages.common.params import validate
from gradtrail.support.errors import UserError

_PREFIX = "gradtrail-event: "

What = Literal["running", "waiting", "made", "there", "unchanged", "failed", "refused"]
ENDED: tuple[What, ...] = ("made", "there", "unchanged", "failed")
SOME_FAILED = 3  # exit status of a job in which experiments failed; 1 is that of any Python program that crashes


@dataclass(frozen=True, kw_only=True)
class Event:
    """A step of an experiment, or of the job.

    Attributes:
        name: of the experiment; empty where the whole job is refused.
        what: `waiting` for a worker or for another holder of its state, `running`, or how it ended.
        seconds: since the job began.
        detail: the node that runs it, or why it failed.
        attempt: how many workers it had before this one.
    """

    name: str
    what: What
    seconds: float
    detail: str = ""
    attempt: int = 0

    def line(self) -> str:
        """Return the line of the log."""
        return _PREFIX + json.dumps(asdict(self), sort_keys=True)


def events_in(log: str) -> Iterator[Event]:
    """Yield the events of a log, whose last line may be incomplete."""
    for line in _complete(log.splitlines(keepends=True)):
        if line.startswith(_PREFIX):
            try:
                yield validate(json.loads(line.removeprefix(_PREFIX)), Event, "event")
            except (ValueError, UserError):  # of another version of this project
                continue


def other_lines(log: str) -> list[str]:
    """Return the lines of a log that are no events, such as those of a traceback."""
    return [line for line in log.splitlines() if line.strip() and not line.startswith(_PREFIX)]


def _complete(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith("\n"))
