"""Leases on states: of those who want to make one, one does. A lease is a ref of the shared git repository.

Its holder renews it every few seconds. One that was not renewed for a minute, by the watch of who looks, is taken over;
at once where its holder's process was on this host and has ended. A holder that was cut off finds its lease gone: it
stops its work, and can no longer publish, as publishing removes the lease in the same push.
"""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradtrail.cluster.task.refs import NONE, SharedRefs
from gradtrail.cluster.task.shell import CommandError
from gradtrail.support.errors import UserError
from gradtrail.tracking.mlflow.tags import is_alive, is_of_this_host, process_tags

_PREFIX = "refs/gradtrail/leases/"


@dataclass(frozen=True)
class Pace:
    """How leases are kept, in seconds.

    Attributes:
        expires: after which a lease that was not renewed is taken over.
        renew: between two renewals.
        poll: between two looks at a lease of someone else.
        call: that a call of git may take which renews a lease or gives it back.
    """

    expires: float = 60.0
    renew: float = 12.0
    poll: float = 1.0
    call: float = 10.0

    @property
    def trusted(self) -> float:
        """How long after a renewal its holder may go on, with time left to stop before others take the lease over."""
        return self.expires - self.renew


PACE = Pace()


class LostLeaseError(UserError):
    """Someone else took the lease over; what was made under it must not be published."""


class Lease:
    """A lease on states that is renewed in a thread while it is held.

    Args:
        refs: of the shared repository.
        values: ref → the value that this process gave it.
        pace: how often it is renewed.
        since: when the push that made it began, by `time.monotonic`.
    """

    def __init__(self, refs: SharedRefs, values: Mapping[str, str], pace: Pace, since: float):
        self._refs = refs.within(pace.call)
        self._since = since
        self._values = dict(values)
        self._pace = pace
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._is_lost = False
        self._when_lost: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    @property
    def keys(self) -> list[str]:
        """The keys of the states."""
        return [ref.removeprefix(_PREFIX) for ref in self._values]

    @contextlib.contextmanager
    def guarding(self, when_lost: Callable[[], object]) -> Iterator[None]:
        """Call `when_lost` at once where the lease is lost while the block runs; raise LostLeaseError at its end."""
        with self._lock:
            self._when_lost = when_lost
            is_lost = self._is_lost
        if is_lost:
            when_lost()
        try:
            yield
        finally:
            with self._lock:
                self._when_lost = lambda: None
        self._require()

    def publish(self, new: Mapping[str, str], refs: SharedRefs) -> None:
        """Create refs and give the lease back, in one push.

        Args:
            new: ref → value; those that exist must have this value.
            refs: of the shared repository, through a folder that has the objects.

        Raises:
            LostLeaseError: the lease is no longer this process's; nothing is published.
            CommandError: the remote cannot be reached; nothing is published, and the lease is still held.
        """
        with self._lock:
            self._require()
            there = refs.read([*new])
            wanted = {ref: (NONE, value) for ref, value in new.items() if there.get(ref) != value}
            if not refs.swap({ref: (value, NONE) for ref, value in self._values.items()} | wanted):
                self._is_lost = True
                self._require()
            self._values = {}

    def release(self) -> None:
        """Give the lease back; without a word where it is lost or the remote cannot be reached, where it expires."""
        self._is_over.set()
        self._thread.join()
        if self._values and not self._is_lost:
            with contextlib.suppress(CommandError):
                self._refs.swap({ref: (value, NONE) for ref, value in self._values.items()})

    def _require(self) -> None:
        if self._is_lost:
            names = ", ".join(key[:12] for key in self.keys)
            raise LostLeaseError(f"the lease on {names} was taken over: this process was cut off")

    def _keep(self) -> None:
        renewed, new, began = self._since, "", 0.0
        while True:
            deadline = renewed + self._pace.trusted
            if self._is_over.wait(max(0.0, min(self._pace.renew, deadline - time.monotonic()))):
                return
            with contextlib.suppress(CommandError), self._lock:  # else it is tried again, until it expires
                if not self._values:
                    return
                refs = self._refs.within(self._pace.call, deadline)
                if not new:  # else the last push may have arrived without an answer
                    began = time.monotonic()
                    new = refs.write_blob(_holder())
                if refs.swap({ref: (value, new) for ref, value in self._values.items()}):
                    self._values = dict.fromkeys(self._values, new)
                    renewed, new = began, ""
                else:
                    self._is_lost = True
            if self._is_lost or time.monotonic() >= renewed + self._pace.trusted:
                self._is_lost = True
                self._when_lost()
                return


def acquire(refs: SharedRefs, keys: Sequence[str], pace: Pace = PACE) -> Lease | None:
    """Return a lease on all states with these keys; None where someone who is alive holds one of them.

    Waits until a lease of someone else is renewed, which shows that its holder is alive, given back or expired.
    """
    names = [f"{_PREFIX}{key}" for key in keys]
    seen: dict[str, tuple[str, float]] = {}  # ref → value, when it was first seen
    while True:
        held, now = refs.read(names), time.monotonic()
        if any(ref in seen and seen[ref][0] != value for ref, value in held.items()):
            return None
        seen = {ref: seen.get(ref, (value, now)) for ref, value in held.items()}
        if all(now - since > pace.expires or _is_dead(refs, ref, value) for ref, (value, since) in seen.items()):
            own, began = refs.write_blob(_holder()), time.monotonic()
            in_time = refs.within(pace.trusted, began + pace.trusted)
            if in_time.swap({ref: (held.get(ref, NONE), own) for ref in names}):
                return Lease(refs, dict.fromkeys(names, own), pace, began)
            return None
        time.sleep(pace.poll)


def _holder() -> str:
    return json.dumps(process_tags() | {"nonce": secrets.token_hex(8)}, sort_keys=True)


def _is_dead(refs: SharedRefs, ref: str, value: str) -> bool:
    """Whether the holder of a lease was a process of this host, and has ended."""
    try:
        holder = json.loads(refs.read_blob(ref, value))
    except (CommandError, ValueError):  # it was renewed or given back meanwhile
        return False
    return is_of_this_host(holder) and not is_alive(holder)
