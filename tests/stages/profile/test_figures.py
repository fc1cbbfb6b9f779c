"""Figures of a profile show the static costs and the times that they are drawn from."""

from pathlib import Path

import pytest
from stage_results import CONFIGURED, timings_of

from gradtrail.stages.artifacts import plotting
from gradtrail.stages.profile import timings


def test_times_are_written_as_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(path.name))
    timings.write(tmp_path, timings_of(), CONFIGURED, "a title")
    stems = ("jit", "batch_sizes", "precision_and_remat", "roofline", "where_the_time_goes")
    assert drawn == [f"{stem}.png" for stem in stems]
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {"functions", "doubling", "where_the_time_goes", "steps"}
