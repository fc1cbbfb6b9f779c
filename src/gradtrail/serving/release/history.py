"""The alias `champion` of the registry, and its history in tags of the versions.

The registry has no compare-and-set. So a process that moves the alias first writes a claim, a tag of the new champion,
and reads all tags again: of two concurrent processes at least one sees the other's claim. The process with the larger
key withdraws; the one with the smaller key waits until the other has withdrawn, or withdraws itself if the other has
finished. The alias is read again after the move, as somebody may have moved it by hand. (The order of claims is that of
L. Lamport's bakery, Communications of the ACM 17, 1974.) A claim of a process that died is ignored after a minute.
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

from gradtrail.serving.registry import CHAMPION, find_alias
from gradtrail.support.errors import UserError
from gradtrail.support.git import git

_TAG = re.compile(r"champion\.(\d{6})\.([0-9a-f]{8})")
_STALE_SECONDS, _PAUSE_SECONDS = 60.0, 0.2
Kind = Literal["promoted", "rolled back"]


class PromotionRefused(Exception):  # noqa: N818 - an answer, not an error
    """The alias was not moved; the message has a line for each reason."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A move of the alias, or the claim to one."""

    sequence: int  # later moves have larger numbers
    token: str  # distinguishes claims with the same number
    version: str  # the new champion
    kind: Kind
    replaced: str | None  # the previous champion; None if there was none
    time: str  # UTC
    by: str  # user
    reason: str  # the user's words; may be empty
    forced: str  # reasons against the move that --force overruled
    is_done: bool  # whether the alias was moved; else it is a claim

    @property
    def key(self) -> str:
        """The name of its tag; keys order events."""
        return f"champion.{self.sequence:06}.{self.token}"

    @property
    def is_fresh(self) -> bool:
        """Whether a claim is so young that its process may still run."""
        age = datetime.now(UTC) - datetime.fromisoformat(self.time)
        return abs(age.total_seconds()) < _STALE_SECONDS


def user() -> str:
    """Return the user's name in git, or in the system."""
    if name := git("config", "user.name"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def versions_of(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Return the versions of a model that are not deleted, the newest first."""
    versions: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name = '{name}'", max_results=1000, page_token=token)
        versions += page
        if not (token := page.token):
            return sorted(versions, key=lambda version: -int(version.version))


def events_of(versions: Iterable[ModelVersion]) -> list[Event]:
    """Return the moves and claims in the tags of versions, in their order; damaged tags are ignored."""
    events = []
    for version in versions:
        for key, value in version.tags.items():
            if match := _TAG.fullmatch(key):
                with contextlib.suppress(ValueError, TypeError):
                    content = json.loads(value)
                    datetime.fromisoformat(content["time"])
                    key_fields = {"sequence": int(match[1]), "token": match[2], "version": str(version.version)}
                    events.append(Event(**{**content, **key_fields}))
    return sorted(events, key=lambda event: event.key)


def champions(events: Iterable[Event]) -> list[str]:
    """Return the successive champions that were not rolled back; the last one is champion now."""
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
    """Return the version to roll back to; None if the history has none.

    If somebody moved the alias by hand, it is the champion before the alias's version, or the last recorded champion.
    """
    stack = champions(events)
    if current in stack:
        while stack.pop() != current:
            pass
    return stack[-1] if stack else None


def move(client: MlflowClient, name: str, event: Event) -> None:
    """Move the alias `champion` to the version of an event, if it still refers to `event.replaced`.

    Args:
        client: Client of the store.
        name: Name of the model.
        event: The claim, from `claim_of`.

    Raises:
        PromotionRefused: Another process moved it, or is about to.
        UserError: The version does not exist.
    """
    _write(client, name, event)
    try:
        _wait_for_turn(client, name, event)
        client.set_registered_model_alias(name, CHAMPION, event.version)
        now = find_alias(client, name, CHAMPION)
        if now is None or str(now.version) != event.version:
            raise PromotionRefused(f"somebody else moved {CHAMPION} meanwhile: it is {_describe(now)} now")
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
    """Return a claim to the next move after these events."""
    return Event(
        sequence=max((event.sequence for event in events), default=0) + 1,
        token=secrets.token_hex(4),
        version=version,
        kind=kind,
        replaced=replaced,
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        by=user(),
        reason=reason,
        forced=forced,
        is_done=False,
    )


def _wait_for_turn(client: MlflowClient, name: str, claim: Event) -> None:
    """Return when the alias may be moved; raise PromotionRefused if another process comes first."""
    deadline = time.monotonic() + _STALE_SECONDS
    while True:
        events = [event for event in events_of(versions_of(client, name)) if event.key != claim.key]
        if done := [event for event in events if event.is_done and event.sequence >= claim.sequence]:
            last = done[-1]
            raise PromotionRefused(f"{last.by} was first: {CHAMPION} is version {last.version} since {last.time}")
        rivals = [event for event in events if not event.is_done and event.is_fresh]
        if first := [event for event in rivals if event.key < claim.key]:
            raise PromotionRefused(
                f"{first[0].by} is moving {CHAMPION} to version {first[0].version}; look, and try again"
            )
        now = find_alias(client, name, CHAMPION)
        if (str(now.version) if now else None) != claim.replaced:
            raise PromotionRefused(f"somebody else moved {CHAMPION} meanwhile: it is {_describe(now)} now")
        if not rivals:
            return
        if time.monotonic() > deadline:
            raise PromotionRefused(f"{rivals[0].by} is moving {CHAMPION} too, and does not finish; try again")
        time.sleep(_PAUSE_SECONDS)


def _write(client: MlflowClient, name: str, event: Event) -> None:
    content = {key: value for key, value in asdict(event).items() if key not in ("sequence", "token", "version")}
    client.set_model_version_tag(name, event.version, event.key, json.dumps(content, sort_keys=True))


def _describe(version: ModelVersion | None) -> str:
    return f"version {version.version}" if version else "no version"
