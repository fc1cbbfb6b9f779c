"""Events of a job: one line of JSON per event in the job's log, so that a later command can read them again."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

_PREFIX = "gradtrail-event: "

State = Literal["running", "waiting", "made", "there", "unchanged", "failed", "refused"]
ENDED: tuple[State, ...] = ("made", "there", "unchanged", "failed")
SOME_FAILED = 3  # exit status of a job in which experiments failed; 1 is that of any Python program that crashes


@dataclass(frozen=True, kw_only=True)
class Event:
    """A step of an experiment, or of the job."""

    name: str  # name of the experiment; empty if the whole job is refused
    state: State  # `waiting` for a worker or a shared state, `running`, or the outcome
    seconds: float  # time since the job began
    detail: str = ""  # node that runs it, or reason of a failure
    attempt: int = 0  # number of workers that it had before

    def line(self) -> str:
        """Return the line of the log."""
        return _PREFIX + json.dumps(asdict(self), sort_keys=True)


def events_in(log: str) -> Iterator[Event]:
    """Yield the events of a log, whose last line may be incomplete."""
    for line in log[: log.rfind("\n") + 1].splitlines():
        if line.startswith(_PREFIX):
            yield Event(**json.loads(line.removeprefix(_PREFIX)))


def other_lines(log: str) -> list[str]:
    """Return the lines of a log that are not events, such as those of a traceback."""
    return [line for line in log.splitlines() if line.strip() and not line.startswith(_PREFIX)]
