"""Who was champion, and when: the alias `champion` of the registry, and its history in tags of the versions.

The registry has no compare-and-set. So whoever moves the alias first writes a claim, a tag of the version that is to be
champion, and reads all tags again: of two that move it at once at least one sees the other's claim. The one with the
larger key withdraws; the one with the smaller key waits until it has, or finds that the other had finished before, and
then withdraws itself. After the alias was moved it is read again: someone may have moved it by hand. (The order of
claims is that of L. Lamport's bakery, Communications of the ACM 17, 1974.) A claim of a process that died is ignored
after a minute.
"""

import contextlib
import getpass
import json
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from gradtrail.serving.registry import CHAMPION, of_alias
from gradtrail.support.errors import UserError
from gradtrail.support.git import git

_TAG = re.compile(r"champion\.(\d{6})\.([0-9a-f]{8})")
_STALE_SECONDS, _PAUSE_SECONDS = 60.0, 0.2
Kind = Literal["promoted", "rolled back"]


class Refused(Exception):  # noqa: N818 - an answer, not an error
    """The alias was not moved; the message says why, a line for each reason."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A move of the alias, or the claim to one.

    Attributes:
        sequence: number; larger ones are later.
        token: tells claims of one number apart.
        version: that became champion.
        kind: how.
        replaced: the version before; None where there was none.
        at: when, UTC.
        by: who.
        reason: why, in their words; may be empty.
        forced: what was overruled; empty where nothing was.
        is_done: whether the alias was moved; else it is a claim.
    """

    sequence: int
    token: str
    version: str
    kind: Kind
    replaced: str | None
    at: str
    by: str
    reason: str
    forced: str
    is_done: bool

    @property
    def key(self) -> str:
        """The name of its tag; keys order events."""
        return f"champion.{self.sequence:06}.{self.token}"

    @property
    def is_fresh(self) -> bool:
        """Whether a claim is so young that its process may still live."""
        age = datetime.now(UTC) - datetime.fromisoformat(self.at)
        return abs(age.total_seconds()) < _STALE_SECONDS


def user() -> str:
    """Return who runs this: the user of git, or of the system."""
    if name := git("config", "user.name"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def versions_of(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Return the versions of a model, which are not deleted; the newest first."""
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name = '{name}'", max_results=1000, page_token=token)
        found += page
        if not (token := page.token):
            return sorted(found, key=lambda version: -int(version.version))


def events_of(versions: Iterable[ModelVersion]) -> list[Event]:
    """Return the moves and claims that the tags of versions tell of, in their order; damaged tags are ignored."""
    found = []
    for version in versions:
        for key, value in version.tags.items():
            if match := _TAG.fullmatch(key):
                with contextlib.suppress(ValueError, TypeError):
                    content = json.loads(value)
                    datetime.fromisoformat(content["at"])
                    told = {"sequence": int(match[1]), "token": match[2], "version": str(version.version)}
                    found.append(Event(**{**content, **told}))
    return sorted(found, key=lambda event: event.key)


def champions(events: Iterable[Event]) -> list[str]:
    """Return the versions that were champion one after the other and were not rolled back; the last is it now."""
    stack: list[str] = []
    for event in events:
        if not event.is_done:
            continue
        if event.kind == "rolled back" and event.version in stack:
            while stack[-1] != event.version:
                stack.pop()
            continue
        stack.append(event.version)
    return stack


def before(events: Iterable[Event], current: str | None) -> str | None:
    """Return the version to roll back to; None where the history has none.

    Where the alias names another version than the last move, somebody moved it otherwise: then the one before that
    version counts, or the last recorded champion.
    """
    stack = champions(events)
    if current in stack:
        while stack.pop() != current:
            pass
    return stack[-1] if stack else None


def move(client: MlflowClient, name: str, event: Event) -> None:
    """Move the alias `champion` as an event says, provided that it is still at `event.replaced`.

    Args:
        client: of the store.
        name: of the model.
        event: the claim, from `claim_of`.

    Raises:
        Refused: another process moved it, or is about to.
        UserError: the version is gone.
    """
    _write(client, name, event)
    try:
        _wait_for_turn(client, name, event)
        client.set_registered_model_alias(name, CHAMPION, event.version)
        now = of_alias(client, name, CHAMPION)
        if now is None or str(now.version) != event.version:
            raise Refused(f"somebody else moved {CHAMPION} meanwhile: it is {_named(now)} now")
        _write(client, name, Event(**{**asdict(event), "is_done": True}))
    except BaseException as error:
        with contextlib.suppress(MlflowException):
            client.delete_model_version_tag(name, event.version, event.key)
        if isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise UserError(f"models:/{name}/{event.version}: the version is gone") from None
        raise


def claim_of(
    events: Sequence[Event], version: str, kind: Kind, *, replaced: str | None, reason: str = "", forced: str = ""
) -> Event:
    """Return the claim to a move after these events."""
    return Event(
        sequence=max((event.sequence for event in events), default=0) + 1,
        token=secrets.token_hex(4),
        version=version,
        kind=kind,
        replaced=replaced,
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        by=user(),
        reason=reason,
        forced=forced,
        is_done=False,
    )


def _wait_for_turn(client: MlflowClient, name: str, own: Event) -> None:
    """Return when the alias may be moved; raise Refused where another process is before this one."""
    deadline = time.monotonic() + _STALE_SECONDS
    while True:
        others = [event for event in events_of(versions_of(client, name)) if event.key != own.key]
        if done := [event for event in others if event.is_done and event.sequence >= own.sequence]:
            last = done[-1]
            raise Refused(f"{last.by} was first: {CHAMPION} is version {last.version} since {last.at}")
        rivals = [event for event in others if not event.is_done and event.is_fresh]
        if first := [event for event in rivals if event.key < own.key]:
            raise Refused(f"{first[0].by} is moving {CHAMPION} to version {first[0].version}; look, and try again")
        now = of_alias(client, name, CHAMPION)
        if (str(now.version) if now else None) != own.replaced:
            raise Refused(f"somebody else moved {CHAMPION} meanwhile: it is {_named(now)} now")
        if not rivals:
            return
        if time.monotonic() > deadline:
            raise Refused(f"{rivals[0].by} is moving {CHAMPION} too, and does not finish; try again")
        time.sleep(_PAUSE_SECONDS)


def _write(client: MlflowClient, name: str, event: Event) -> None:
    told = {key: value for key, value in asdict(event).items() if key not in ("sequence", "token", "version")}
    client.set_model_version_tag(name, event.version, event.key, json.dumps(told, sort_keys=True))


def _named(version: ModelVersion | None) -> str:
    return f"version {version.version}" if version else "no version"
