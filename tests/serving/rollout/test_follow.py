"""Following an alias, with a registry that can be told what to say."""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from gradtrail.serving.monitoring.metrics import ServerMetrics
from gradtrail.serving.registry import RegistryDown
from gradtrail.serving.rollout.follow import MAX_BACKOFF, Follower
from gradtrail.support.errors import UserError


@dataclass
class Registry:
    """Answers with a version, or raises."""

    says: str | Exception | None = "1"
    cannot_load: set[str] = field(default_factory=set)
    taken: list[str | None] = field(default_factory=list)

    def version_of(self, name: str, alias: str) -> str | None:
        assert (name, alias) == ("digits", "champion")
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def take(self, version: str | None) -> None:
        if version in self.cannot_load:
            raise UserError(f"version {version}: the download is damaged")
        self.taken.append(version)


def follower(registry: Registry, role: str = "primary") -> Follower:
    return Follower(
        name="digits",
        alias="champion",
        role="primary" if role == "primary" else "challenger",
        known="1",
        version_of=registry.version_of,
        take=registry.take,
        metrics=ServerMetrics(),
    )


def steps(follower: Follower, count: int = 1) -> None:
    for _ in range(count):
        asyncio.run(follower.step())


def is_up(follower: Follower) -> float | None:
    return follower.metrics.registry.get_sample_value("gradtrail_registry_up")


def test_another_version_is_taken_once() -> None:
    registry = Registry()
    following = follower(registry)
    steps(following, 2)
    assert registry.taken == []
    registry.says = "2"
    steps(following, 3)
    assert registry.taken == ["2"]
    assert following.known == "2"


def test_a_registry_that_is_down_changes_nothing_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(RegistryDown("MLflow's registry does not answer: refused"))
    following = follower(registry)
    with caplog.at_level(logging.WARNING):
        steps(following, 5)
        assert is_up(following) == 0
        registry.says = "2"
        steps(following)
    assert is_up(following) == 1
    assert [each.message for each in caplog.records] == [
        "digits@champion: MLflow's registry does not answer: refused; version 1 keeps serving",
        "the registry answers again",
    ]
    assert registry.taken == ["2"], "a promotion in the meantime is picked up"


def test_a_bug_while_the_registry_is_asked_is_a_traceback_and_no_registry_that_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry(KeyError("a bug"))
    following = follower(registry)
    following.metrics.registry_up(True)
    with caplog.at_level(logging.WARNING):
        steps(following, 3)
    assert is_up(following) == 1
    (record,) = caplog.records
    assert record.message == "digits@champion cannot be read, version 1 keeps serving: 'a bug'"
    assert record.exc_info is not None
    registry.says = "2"
    steps(following)
    assert registry.taken == ["2"]


def test_a_version_that_cannot_be_loaded_is_said_once_and_tried_again_ever_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry("2", cannot_load={"2"})
    following = follower(registry)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 12:
            registry.cannot_load.clear()
        if len(waits) == 14:
            raise asyncio.CancelledError

    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        asyncio.run(following.run(sleep))
    assert [each.message for each in caplog.records] == [
        "digits@champion: version 2 cannot be used, version 1 keeps serving: version 2: the download is damaged"
    ]
    assert registry.taken == ["2"]
    assert waits[0] <= 6
    assert max(waits) >= 0.8 * MAX_BACKOFF
    assert waits[-1] <= 6, "it is well again"
    failures = following.metrics.registry.get_sample_value("gradtrail_follow_failures_total", {"role": "primary"})
    assert failures == 11


def test_a_champion_whose_alias_is_gone_goes_on_and_a_challenger_ends(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(None)
    with caplog.at_level(logging.WARNING):
        steps(follower(registry), 2)
    assert registry.taken == []
    assert [each.message for each in caplog.records] == [
        "digits has no alias champion any longer; version 1 keeps serving"
    ]
    steps(follower(registry, "challenger"), 2)
    assert registry.taken == [None]


def test_servers_do_not_ask_in_step() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 50:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follower(Registry()).run(sleep))
    assert min(waits) >= 4
    assert max(waits) <= 6
    assert len(set(waits)) == 50


def test_a_fault_of_our_own_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry("2")
    following = follower(registry)

    async def take(version: str | None) -> None:
        raise KeyError(version)

    following.take = take
    with caplog.at_level(logging.WARNING):
        steps(following, 2)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
