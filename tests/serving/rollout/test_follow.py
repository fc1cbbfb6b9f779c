"""Following an alias, with a registry whose answers the tests set."""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.registry import RegistryUnavailable
from gradtrail.serving.rollout.follow import MAX_BACKOFF, Follower
from gradtrail.support.errors import UserError


@dataclass
class Registry:
    """Answers with a version, or raises."""

    answer: str | Exception | None = "1"
    damaged: set[str] = field(default_factory=set)
    loaded: list[str | None] = field(default_factory=list)

    def version_of(self, name: str, alias: str) -> str | None:
        assert (name, alias) == ("digits", "champion")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def load(self, version: str | None) -> None:
        if version in self.damaged:
            raise UserError(f"version {version}: the download is damaged")
        self.loaded.append(version)


def follower(registry: Registry, role: str = "primary") -> Follower:
    return Follower(
        name="digits",
        alias="champion",
        role="primary" if role == "primary" else "challenger",
        version="1",
        version_of=registry.version_of,
        load=registry.load,
        metrics=ServerMetrics(),
    )


def steps(follower: Follower, count: int = 1) -> None:
    for _ in range(count):
        asyncio.run(follower.step())


def is_up(follower: Follower) -> float | None:
    return follower.metrics.registry.get_sample_value("gradtrail_registry_up")


def test_new_version_is_loaded_once() -> None:
    registry = Registry()
    following = follower(registry)
    steps(following, 2)
    assert registry.loaded == []
    registry.answer = "2"
    steps(following, 3)
    assert registry.loaded == ["2"]
    assert following.version == "2"


def test_unavailable_registry_changes_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(RegistryUnavailable("MLflow's registry does not respond: refused"))
    following = follower(registry)
    with caplog.at_level(logging.WARNING):
        steps(following, 5)
        assert is_up(following) == 0
        registry.answer = "2"
        steps(following)
    assert is_up(following) == 1
    assert [record.message for record in caplog.records] == [
        "digits@champion: MLflow's registry does not respond: refused; version 1 keeps serving",
        "the registry responds again",
    ]
    assert registry.loaded == ["2"]


@pytest.mark.parametrize("is_load", [False, True])
def test_bug_is_logged_once_with_a_traceback_and_retried(is_load: bool, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry("2" if is_load else KeyError("a bug"))
    following = follower(registry)
    following.metrics.registry_up.set(1)

    async def load(version: str | None) -> None:
        raise KeyError("a bug")

    if is_load:
        following.load = load
    with caplog.at_level(logging.WARNING):
        steps(following, 3)
    assert is_up(following) == 1
    (record,) = caplog.records
    state = ": version 2 cannot be used" if is_load else " cannot be read"
    assert record.message == f"digits@champion{state}, version 1 keeps serving: 'a bug'"
    assert record.exc_info is not None
    registry.answer, following.load = "2", registry.load
    steps(following)
    assert registry.loaded == ["2"]


def test_damaged_version_is_logged_once_and_retried_with_backoff(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry("2", damaged={"2"})
    following = follower(registry)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 12:
            registry.damaged.clear()
        if len(waits) == 14:
            raise asyncio.CancelledError

    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        asyncio.run(following.run(sleep))
    assert [record.message for record in caplog.records] == [
        "digits@champion: version 2 cannot be used, version 1 keeps serving: version 2: the download is damaged"
    ]
    assert registry.loaded == ["2"]
    assert 4 <= waits[0] <= 6, "5 s, spread by 20 %"
    assert max(waits) >= 0.8 * MAX_BACKOFF
    assert waits[-1] <= 6
    failures = following.metrics.registry.get_sample_value("gradtrail_follow_failures_total", {"role": "primary"})
    assert failures == 11


def test_removed_alias_keeps_the_champion_and_ends_the_challenger(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(None)
    with caplog.at_level(logging.WARNING):
        steps(follower(registry), 2)
    assert registry.loaded == []
    assert [record.message for record in caplog.records] == [
        "digits no longer has the alias champion; version 1 keeps serving"
    ]
    steps(follower(registry, "challenger"), 2)
    assert registry.loaded == [None]
