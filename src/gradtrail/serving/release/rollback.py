"""`gradtrail rollback`: the previous champion becomes champion again."""

from gradtrail.serving.registry import CHAMPION, find_alias, registered_name
from gradtrail.serving.release.history import (
    Event,
    PromotionRefused,
    before,
    claim_of,
    events_of,
    move,
    user,
    versions_of,
)
from gradtrail.support.errors import UserError, printable
from gradtrail.tracking.store import open_store


def rollback(reason: str) -> int:
    """Move the alias `champion` back to the previous champion; repeated calls go back further.

    Args:
        reason: Reason for the history.

    Returns:
        The exit status: 0, or 1 if another process moved the alias.

    Raises:
        UserError: There is no champion, or none before it; one line.
    """
    name, client = registered_name(), open_store()
    versions = versions_of(client, name)
    if not versions:
        raise UserError(f"{name}: no such model in MLflow's registry; `gradtrail promote RUN` registers one")
    events = events_of(versions)
    champion = find_alias(client, name, CHAMPION)
    now = str(champion.version) if champion else None
    target = before(events, now)
    if target is None:
        state = f"version {now} is champion, and the history has none before it" if now else "there is no champion"
        raise UserError(f"{name}: {state}; nothing to roll back to")
    event = claim_of(events, target, "rolled back", replaced=now, reason=reason)
    try:
        move(client, name, event)
    except PromotionRefused as refused:
        print(printable(f"Refused: {refused}"))
        return 1
    if now:
        author = f"by {user()}{f': {reason}' if reason else ''}"
        client.set_model_version_tag(name, now, "rolled_back", f"{event.time} {author}")
    for deleted in _deleted(events, now, target, {str(version.version) for version in versions}):
        print(f"skipped version {deleted}, a former champion that was deleted")
    print(f"version {target} of {name} is champion again{f', in place of version {now}' if now else ''}")
    return 0


def _deleted(events: list[Event], now: str | None, target: str, existing: set[str]) -> list[str]:
    """Return the deleted versions between the champion and the previous one, whose history is deleted too."""
    deleted = []
    for event in reversed(events):
        if event.version == target:
            break
        if event.is_done and event.version == now and event.replaced and event.replaced not in existing:
            deleted.append(event.replaced)
    return deleted
