"""What a server that starts a rollout takes: a champion that fits, and a challenger that can be loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
from trial_bench import Bench, run, sound

from gradtrail.serving.rollout.follow import Follower
from gradtrail.serving.rollout.start import RolloutConfig, roll_out
from gradtrail.serving.server.router import Served, Source
from gradtrail.support.errors import UserError


@pytest.mark.parametrize("other", [{"name": "letters"}, {"image_shape": (8, 8)}])
def test_a_champion_that_does_not_fit_is_not_taken(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    followers: list[Follower] = []

    async def hold(follower: Follower) -> None:
        followers.append(follower)

    monkeypatch.setattr(Follower, "run", hold)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("gradtrail.serving.rollout.start.remember", lambda *said: told.append(said))

    async def scenario(made: Bench) -> None:
        made.router.rollout = None
        versions = {"2": made.load(sound, "2", **other), "3": made.load(sound, "3")}

        async def load(source: Source) -> Served:
            return versions[source.version]

        monkeypatch.setattr(made.router, "load", load)
        config = RolloutConfig(follow_seconds=5)
        locate = lambda address: Source(folder=Path(), version=address.rpartition("/")[2])  # noqa: E731
        await roll_out("models:/digits@champion", config, made.router, made.metrics, locate)
        with pytest.raises(UserError, match="version 2: takes other images, or has other classes or another name"):
            await followers[0].take("2")
        assert (made.router.current.version, told) == ("1", [])
        await followers[0].take("3")
        assert made.router.current.version == "3"
        assert told == [("models:/digits@champion", "models:/digits/3")]

    run(scenario)


def test_a_challenger_that_is_no_alias_and_cannot_be_loaded_is_told_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def locate(address: str) -> Source:
        raise UserError(f"{address}: no exported model here")

    async def scenario(made: Bench) -> None:
        config = RolloutConfig(follow_seconds=0, challenger="nowhere", trial=made.trial.config)
        await roll_out("models:/digits@champion", config, made.router, made.metrics, locate)
        assert (await made.ask(1)).by.version == "1"
        assert made.value("gradtrail_follow_failures_total", role="challenger") == 1

    with caplog.at_level(logging.WARNING, "gradtrail.serve"):
        run(scenario)
    told = "challenger nowhere cannot be used, none is tried: nowhere: no exported model here"
    assert [(each.message, each.exc_info) for each in caplog.records] == [(told, None)]
