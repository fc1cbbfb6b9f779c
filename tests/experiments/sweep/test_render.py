"""The result of a comparison: pairs by seed, a verdict per variant; as a table, sentences, Markdown and a figure."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
from drawing import assert_same_png_twice
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from rich.console import Console

from gradtrail.experiments.sweep.render import answer, as_frame, as_markdown, as_table, draw_comparison
from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import Comparison, PlannedRun
from gradtrail.experiments.sweep.stats import Summary, paired_difference, summarize
from gradtrail.stages.artifacts import plotting

LABELS = ("plain", "better", "same", "other")
COMPARISON = Comparison(about="which?", seeds=(0, 1, 2), variants={label: {} for label in LABELS})
PLAIN, BETTER, SAME = [0.900, 0.910, 0.895], [0.921, 0.930, 0.9155], [0.901, 0.9095, 0.8945]


def completed(
    label: str, accuracies: list[float], *, seconds: float | None = 2.0, first: int = 0
) -> list[CompletedRun]:
    return [
        CompletedRun(
            planned=PlannedRun(label, seed),
            accuracy=accuracy,
            loss=1 - accuracy,
            seconds=seconds,
            compile_seconds=None if seconds is None else 0.5,
            dataset="digits 01234567",
            run_id=f"{label}{seed}",
        )
        for seed, accuracy in enumerate(accuracies, start=first)
    ]


def of(*runs: list[CompletedRun]) -> dict[str, Summary]:
    summaries = summarize([one for part in runs for one in part], COMPARISON)
    return {summary.label: summary for summary in summaries}


def test_each_variant_is_compared_with_the_first_in_pairs_and_p_is_adjusted() -> None:
    found = of(completed("plain", PLAIN), completed("better", BETTER, seconds=1.0), completed("same", SAME))
    raw = {"better": paired_difference(BETTER, PLAIN), "same": paired_difference(SAME, PLAIN)}
    assert found["better"].difference == raw["better"]
    assert found["better"].p_value == pytest.approx(2 * raw["better"].p_value)
    assert found["same"].p_value == raw["same"].p_value == pytest.approx(1)
    assert [each.verdict for each in found.values()] == ["baseline", "more than chance", "no more than chance"]
    assert (found["better"].time_ratio, found["better"].loss) == (0.5, pytest.approx(1 - sum(BETTER) / 3))


def test_only_seeds_that_both_have_make_pairs() -> None:
    found = of(completed("plain", PLAIN), completed("better", [0.93, 0.92], first=1))
    assert found["better"].difference == paired_difference([0.93, 0.92], PLAIN[1:])
    assert [one.planned.seed for one in found["better"].runs] == [1, 2]


def test_one_seed_has_no_verdict_and_does_not_count_in_the_adjustment() -> None:
    found = of(
        completed("plain", PLAIN),
        completed("better", BETTER),
        completed("same", SAME[:1]),
        completed("other", SAME, first=7),
    )
    assert found["same"].verdict == "unknown: one seed"
    assert found["other"].verdict == "unknown: no seed in common"
    assert found["better"].p_value == found["better"].difference.p_value  # type: ignore[union-attr]
    assert math.isnan(found["same"].p_value)


def test_the_table_has_all_metrics() -> None:
    summaries = list(
        of(completed("plain", PLAIN), completed("better", BETTER, seconds=1.0), completed("other", [0.9])).values()
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_table(summaries, "which?"))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "which?"
    assert "plain 0, 1, 2 90.17 ± 0.76 baseline 0.0983 2.0 1.00 0.5" in lines
    assert "better 0, 1, 2 92.22 ± 0.73 +2.05 (+1.93 to +2.17) < 0.001 more than chance 0.0778 1.0 0.50 0.5" in lines
    assert "other 0 90.00 0.00 unknown: one seed 0.1000 2.0 1.00 0.5" in lines


def test_without_times_there_is_no_column_for_them() -> None:
    summaries = list(of(completed("plain", PLAIN, seconds=None), completed("same", SAME, seconds=None)).values())
    text = as_markdown(summaries, "", "")
    assert "training" not in text
    assert "compile" not in text
    assert "trains" not in text


def test_markdown_has_question_table_and_answer() -> None:
    summaries = list(of(completed("plain", PLAIN), completed("same", SAME)).values())
    lines = as_markdown(summaries, "**which?**", "how to read it").splitlines()
    assert lines[0] == "**which?**"
    rows = [line for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert rows[3].startswith("| same | 0, 1, 2 | 90.17 ± 0.75 | 0.00 (−0.22 to +0.22) | 1.000 | no more than chance |")
    assert lines[-3:] == [answer(summaries), "", "how to read it"]


def test_the_answer_for_few_variants_is_a_sentence_each() -> None:
    found = of(completed("plain", PLAIN), completed("better", BETTER, seconds=1.25), completed("same", [0.9]))
    first, second = answer(list(found.values())).split(". ")
    assert first.startswith("better differs from plain by +2.05 points (+1.93 to +2.17): more than chance")
    assert first.endswith("; it trains 1.6 × as fast")
    assert second == "same differs from plain by 0.00 points: unknown: one seed; it trains as fast."


def test_the_answer_for_many_variants_groups_them_by_verdict() -> None:
    found = of(
        completed("plain", PLAIN), completed("same", SAME), completed("better", BETTER), completed("other", [0.9])
    )
    assert answer(list(found.values())) == (
        "Compared with plain, in points of test accuracy: more than chance: better (+2.05); "
        "no more than chance: same (0.00); unknown: one seed: other (0.00)."
    )


def test_where_the_baseline_failed_the_rest_is_shown() -> None:
    summaries = list(of(completed("better", BETTER)).values())
    assert answer(summaries) == "There is nothing to compare yet."
    assert "92.22" in as_markdown(summaries, "", "")


def test_the_frame_has_a_row_per_run() -> None:
    frame = as_frame([*completed("plain", PLAIN), *completed("other", [0.5], seconds=None)])
    assert len(frame) == 4
    assert frame.iloc[1].to_dict() == {
        "variant": "plain",
        "seed": 1,
        "test_accuracy": 0.91,
        "test_loss": pytest.approx(0.09),
        "train_seconds": 2.0,
        "compile_seconds": 0.5,
        "dataset": "digits 01234567",
        "mlflow_run": "plain1",
    }


def drawn(summaries: list[Summary], path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Draw a comparison; return the figure in place of its file."""
    figures: list[Figure] = []
    monkeypatch.setattr(plotting, "save", lambda figure, _: figures.append(figure))
    draw_comparison(path, summaries, "which")
    return figures[0]


def test_the_figure_has_every_run_the_means_and_the_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of(completed("plain", PLAIN), completed("better", BETTER, seconds=1.0), completed("other", [0.9], first=9))
    figure = drawn(list(found.values()), tmp_path / "a.png", monkeypatch)
    accuracy, seconds = figure.axes
    assert [tick.get_text() for tick in accuracy.get_xticklabels()] == ["plain", "better", "other"]
    points = [line.get_ydata() for line in accuracy.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(np.concatenate(points), 100 * np.array([*PLAIN, *BETTER, 0.9]))
    (bar,) = (bar for bar in accuracy.containers if isinstance(bar, ErrorbarContainer) and bar.has_yerr)
    low, high = 100 * paired_difference(BETTER, PLAIN).low, 100 * paired_difference(BETTER, PLAIN).high
    ends = bar.lines[2][0].get_segments()[0][:, 1]
    np.testing.assert_allclose(ends - 100 * np.mean(PLAIN), [low, high])
    assert [bar.get_height() for bar in seconds.patches] == [2.0, 1.0, 2.0]


def test_the_figure_of_runs_without_times_has_no_times_and_equal_bytes(tmp_path: Path) -> None:
    summaries = list(of(completed("plain", PLAIN[:1], seconds=None), completed("same", SAME, seconds=None)).values())
    assert_same_png_twice(lambda path: draw_comparison(path, summaries, "which"), tmp_path)


def test_a_figure_without_times_has_one_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summaries = list(of(completed("plain", PLAIN, seconds=None), completed("same", SAME, seconds=None)).values())
    assert len(drawn(summaries, tmp_path / "a.png", monkeypatch).axes) == 1
