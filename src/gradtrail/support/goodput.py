"""Goodput: the share of a run's time that useful steps took, and the seconds by cause, over all attempts.

The causes sum to the time from the start of the first attempt to the last sign of life of the last one. They are those
of Google's ml-goodput-measurement (`BadputType` in github.com/AI-Hypercomputer/ml-goodput-measurement) in plain words:
`preparation` is its TRAINING_PREP, `compile` its PROGRAM_STARTUP, `data_loading` its DATA_LOADING_SYNC, `idle` its
INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION. Out of scope: work that overlaps with that of the main thread.
"""

import contextlib
import json
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_SECONDS, _SHARE = 0.2, 0.005  # time between two lines, and as a share of the attempt: a long one writes few


@dataclass(kw_only=True)
class Attempt:
    """One execution, as far as it is known."""

    began: float  # start of the process, in seconds since the epoch
    seconds: dict[str, float]  # time until the last sign of life, by cause
    # network → its first and last step in this attempt, each with the seconds of steps until then
    networks: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


class Stopwatch:
    """The seconds of a process by cause; each moment is of the innermost `phase`, outside of all of `preparation`."""

    def __init__(self, seconds: Mapping[str, float], clock: Callable[[], float] = time.time):
        self._clock, self._since, self._cause = clock, clock(), "preparation"
        self._attempt = Attempt(began=self._since - sum(seconds.values()), seconds=defaultdict(float, seconds))
        self._earlier: list[Attempt] = []
        self._lock = threading.RLock()

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts of the run until now; the last one is this."""
        self._switch(self._cause)
        return [*self._earlier, self._attempt]

    @contextlib.contextmanager
    def phase(self, cause: str) -> Iterator[None]:
        """Count the time of a block, or of the calls of a function, to a cause."""
        outer = self._switch(cause)
        try:
            yield
        finally:
            self._switch(outer)

    def waiting(self, items: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over items, none of them None; the time until each is `data_loading`."""
        iterator, timed_next = iter(items), self.phase("data_loading")(next)
        return iter(lambda: timed_next(iterator, None), None)

    def reached(self, network: str, step: int, *, resumes: bool = False) -> None:
        """Record the step that a network has reached, or resumes at: later steps of earlier attempts were wasted."""
        self._switch(self._cause)
        point, networks = (step, self._attempt.seconds["steps"]), self._attempt.networks
        networks[network] = [point if resumes else networks[network][0], point]

    @contextlib.contextmanager
    def recording(self, folder: Path) -> Iterator[None]:
        """Read the earlier attempts from a folder, and write this one; remove all if the block ends without error."""
        path, is_over = folder / "attempts.jsonl", threading.Event()
        self._earlier = read_attempts(path)

        def write_often() -> None:
            while not is_over.wait(max(_SECONDS, _SHARE * (self._clock() - self._attempt.began))):
                self.write(path)

        self.write(path)
        (thread := threading.Thread(target=write_often, daemon=True)).start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, path: Path) -> None:
        """Append the attempt so far, as a line of which the last whole one counts: a kill loses little."""
        with self._lock, contextlib.suppress(OSError):  # a full disk costs the record, not the work
            self._switch(self._cause)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps(vars(self._attempt))}")  # the line before may be cut off

    def _switch(self, cause: str) -> str:
        """Begin a cause; return the one before."""
        with self._lock:
            now, before = self._clock(), self._cause
            self._attempt.seconds[before] += max(0.0, now - self._since)
            self._since, self._cause = now, cause
            return before


def read_attempts(path: Path) -> list[Attempt]:
    """Return the attempts in a file, in order; lines that a kill or a crash damaged do not count."""
    attempts = dict[float, Attempt]()
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            attempt = Attempt(**json.loads(line))
            attempts[attempt.began] = attempt
    return sorted(attempts.values(), key=lambda attempt: attempt.began)


def seconds_by_cause(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the seconds of attempts, in order, by cause."""
    total = defaultdict[str, float](float)
    for number, attempt in enumerate(attempts):
        for cause, seconds in attempt.seconds.items():
            total[cause] += seconds
        ends = [*(start[1] for start, _ in attempt.networks.values()), attempt.seconds.get("steps", 0.0)][1:]
        for (network, (first, last)), end in zip(attempt.networks.items(), ends, strict=False):
            later = [other.networks[network] for other in attempts[number + 1 :] if network in other.networks]
            if later:
                resumed = min(start[0] for start, _ in later)
                wasted = end - float(np.interp(resumed, [first[0], last[0]], [first[1], last[1]], right=end))
                total["steps"] -= wasted
                total["wasted_progress"] += wasted
    total["idle"] = attempts[-1].began + sum(attempts[-1].seconds.values()) - attempts[0].began - sum(total.values())
    return {cause: seconds for cause, seconds in total.items() if seconds > 1e-6}  # not those of rounding
