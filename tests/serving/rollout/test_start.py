"""A rollout accepts a champion that fits, and survives a challenger that cannot be loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
from trial_bench import bench, sound

from gradtrail.serving.rollout.follow import Follower
from gradtrail.serving.rollout.start import RolloutConfig, roll_out
from gradtrail.serving.server.router import Served, Source
from gradtrail.support.errors import UserError


@pytest.mark.parametrize("other", [{"name": "letters"}, {"image_shape": (8, 8)}])
async def test_champion_of_other_images_or_name_is_refused(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    followers: list[Follower] = []

    async def hold(follower: Follower) -> None:
        followers.append(follower)

    monkeypatch.setattr(Follower, "run", hold)
    remembered: list[tuple[str, str]] = []
    monkeypatch.setattr("gradtrail.serving.rollout.start.remember", lambda *uris: remembered.append(uris))

    with bench() as made:
        versions = {"2": made.load(sound, "2", **other), "3": made.load(sound, "3")}

        async def load(source: Source) -> Served:
            return versions[source.version]

        monkeypatch.setattr(made.trial, "load", load)
        config = RolloutConfig(follow_seconds=5)
        locate = lambda address: Source(folder=Path(), version=address.rpartition("/")[2])  # noqa: E731
        await roll_out("models:/digits@champion", config, made.trial, locate)
        with pytest.raises(UserError, match="version 2: takes other images, or has other classes or another name"):
            await followers[0].load("2")
        assert (made.trial.current.version, remembered) == ("1", [])
        await followers[0].load("3")
        assert made.trial.current.version == "3"
        assert remembered == [("models:/digits@champion", "models:/digits/3")]


async def test_challenger_that_cannot_be_loaded_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def locate(address: str) -> Source:
        raise UserError(f"{address}: no exported model here")

    with caplog.at_level(logging.WARNING, "gradtrail.serve"), bench() as made:
        config = RolloutConfig(follow_seconds=0, challenger="nowhere", trial=made.trial.config)
        await roll_out("models:/digits@champion", config, made.trial, locate)
        assert (await made.ask(1)).model.version == "1"
        assert made.value("gradtrail_follow_failures_total", role="challenger") == 1
    message = "challenger nowhere cannot be used, so there is no trial: nowhere: no exported model here"
    assert [(record.message, record.exc_info) for record in caplog.records] == [(message, None)]
