"""Figures of a profile show the static costs and the times that they are drawn from."""

from pathlib import Path

import numpy as np
import pytest
from drawing import heights, legend_of, lengths, lines, names, points
from stage_results import CONFIGURED, cost_rows, step_times, timings_of

from gradtrail.core.profile.benchmark import MachineRates
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.profile import figures, time_figures, timings
from gradtrail.stages.profile.tables import doubling_table

FUNCTIONS = ("train_step", "predict", "score")


@pytest.mark.parametrize("batch_sizes", [(32,), (16, 32, 64)])
def test_costs_are_drawn_over_the_batch_size_with_other_variants_beside_them(batch_sizes: tuple[int, ...]) -> None:
    costs = cost_rows(batch_sizes)
    figure = figures.draw_costs(costs, CONFIGURED, "a title")
    per_example, read, temporary, total = figure.axes
    sizes = np.array(batch_sizes)
    expected = {
        per_example: 0.1 + 0 * sizes,
        read: (80 + 10 * sizes) / sizes / 2**10,
        temporary: (sizes**2 - 256) / 2**20,
        total: (1000 + sizes**2) / 2**20,
    }
    for axis, values in expected.items():
        np.testing.assert_allclose(points(lines(axis)["train_step"]), np.column_stack([sizes, values]))
        assert axis.get_xticks().tolist() == list(batch_sizes)
        assert names(axis)[1] == "batch size"
    remat, bfloat16 = (lines(total)[f"train_step, {form}"] for form in ("with remat", "bfloat16"))
    assert points(remat).tolist() == points(bfloat16).tolist() == [[32, pytest.approx(2024 / 2**20)]]
    assert {*FUNCTIONS, "predict, bfloat16", "score, bfloat16"} < set(legend_of(figure))
    figure.draw_without_rendering()


@pytest.mark.parametrize(
    ("without_jit", "last", "pays_after"), [(0.1, 100, 21), (0.0011, 1.4 * 20_001, 20_001), (0.001, 100, None)]
)
def test_steps_with_jit_begin_with_compiling_and_meet_those_without_where_it_pays(
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


@pytest.mark.parametrize("batch_sizes", [(32,), (16, 32, 64)])
def test_batch_sizes_have_throughput_memory_and_the_factors_of_each_doubling(batch_sizes: tuple[int, ...]) -> None:
    functions = timings_of(batch_sizes).functions
    doubling = doubling_table(functions, CONFIGURED, timings.DOUBLED)
    figure = time_figures.draw_batch_sizes(functions, doubling, CONFIGURED, "a title")
    throughput, memory, factors = figure.axes
    pace = [size / (0.01 + 0.001 * size) for size in batch_sizes]
    np.testing.assert_allclose(points(throughput.lines[0]), list(zip(batch_sizes, pace, strict=True)))
    np.testing.assert_allclose(memory.lines[0].get_ydata(), 1.5)
    assert points(lines(throughput)["configured"]).tolist() == [[32, pytest.approx(32 / 0.042)]]
    assert heights(factors)["step time"] == pytest.approx([42 / 26, 74 / 42] if len(batch_sizes) > 1 else [])
    assert [tick.get_text() for tick in factors.get_xticklabels()] == ["16 → 32", "32 → 64"][: len(batch_sizes) - 1]
    figure.draw_without_rendering()


def test_variants_have_a_bar_for_each_function() -> None:
    figure = time_figures.draw_forms(timings_of().functions, CONFIGURED, "a title")
    throughput, memory = figure.axes
    pace = pytest.approx(32 / 0.042)
    assert lengths(throughput) == {"configured: float32": [pace] * 3, "bfloat16": [pace] * 3, "with remat": [pace]}
    assert lengths(memory)["with remat"] == [1.5]
    assert [tick.get_text() for tick in throughput.get_yticklabels()] == list(FUNCTIONS)
    assert legend_of(figure) == list(lengths(throughput))


def test_rooflines_have_the_limits_of_the_machine_and_a_point_for_each_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = timings_of()
    rates = MachineRates(flops_per_second=1e10, bytes_per_second=2e10)  # they meet at half a FLOP per byte
    of_variants = time_figures.draw_roofline(timed.functions, CONFIGURED, rates, "a title")
    saved = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.append(figure))
    functions = timed.functions[timed.functions["precision"] == "bfloat16"]
    time_figures.write_function_roofline(tmp_path / "roofline.png", functions, rates, "a title")
    time_figures.write_function_roofline(tmp_path / "roofline.png", functions.assign(flops_per_second=0), rates, "none")
    assert len(saved) == 1, "where nothing was timed nothing is drawn"
    for (axis,) in (of_variants.axes, saved[0].axes):
        roof = points(axis.lines[0])
        assert roof[1].tolist() == [0.5, 1e10]
        assert roof[0, 1] / roof[0, 0] == 2e10, "below, memory is the limit"
        assert roof[2, 1] == 1e10
        shown = {label.split(":")[0]: line for label, line in lines(axis).items() if ":" in label}
        assert {name: points(line).tolist() for name, line in shown.items()} == {name: [[2, 2e9]] for name in FUNCTIONS}
        assert axis.get_xscale() == axis.get_yscale() == "log"


def test_times_of_an_epoch_are_stacked_by_phase() -> None:
    figure = time_figures.draw_times(timings_of().times, "a title")
    (axis,) = figure.axes
    phases = {"trace": 0.1, "lower": 0.1, "compile": 1.0, "first call": 0.01, "one epoch: 430 steady calls": 0.5}
    assert lengths(axis) == {name: [pytest.approx(seconds)] * 3 for name, seconds in phases.items()}
    ends = [bar.get_x() + bar.get_width() for bar in axis.containers[-1]]
    assert ends == pytest.approx([sum(phases.values())] * 3)
    assert [text.get_text() for text in axis.texts] == [" 1.71 s"] * 3
    assert legend_of(figure) == list(phases)


def test_times_are_written_as_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: drawn.append(path.name))
    timings.write(tmp_path, timings_of(), CONFIGURED, "a title")
    stems = ("jit", "batch_sizes", "precision_and_remat", "roofline", "where_the_time_goes")
    assert drawn == [f"{stem}.png" for stem in stems]
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {"functions", "doubling", "where_the_time_goes", "steps"}
