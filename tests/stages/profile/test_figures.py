"""Figures of a profile show the static costs and the times that they are drawn from."""

from pathlib import Path

import pytest
from drawing import points
from stage_results import CONFIGURED, step_times, timings_of

from gradtrail.stages.artifacts import plotting
from gradtrail.stages.profile import time_figures, timings


@pytest.mark.parametrize(
    ("without_jit", "last", "pays_after"), [(0.1, 100, 21), (0.0011, 1.4 * 20_001, 20_001), (0.001, 100, None)]
)
def test_jit_line_starts_at_compile_time_and_meets_eager_line(
    without_jit: float, last: float, pays_after: int | None
) -> None:
    steps = step_times(without_jit=without_jit)
    figure = time_figures.draw_steps(steps, "a title")
    (axis,) = figure.axes
    eager, one_by_one, scanned, *meeting = axis.lines
    assert points(eager)[0].tolist() == [0, 0]
    assert points(one_by_one)[0].tolist() == points(scanned)[0].tolist() == [0, 2.0]
    for line, pace in ((eager, without_jit), (one_by_one, 0.001), (scanned, 0.0008)):
        (start, before), (end, after) = points(line)
        assert (after - before) / (end - start) == pytest.approx(pace)
        assert end == pytest.approx(last, rel=1e-3)
    assert len(meeting) == (pays_after is not None)
    for line in meeting:
        ((step, seconds),) = points(line)
        assert step == pytest.approx(pays_after, rel=1e-3)
        assert seconds == pytest.approx(2.0 + 0.001 * step)
    figure.draw_without_rendering()


def test_times_are_written_as_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(path.name))
    timings.write(tmp_path, timings_of(), CONFIGURED, "a title")
    stems = ("jit", "batch_sizes", "precision_and_remat", "roofline", "where_the_time_goes")
    assert drawn == [f"{stem}.png" for stem in stems]
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {"functions", "doubling", "where_the_time_goes", "steps"}
