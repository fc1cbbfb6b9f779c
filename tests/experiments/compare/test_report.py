"""The result of a comparison: pairs by seed, a verdict per variant; as a table, sentences, Markdown and a figure."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from gradtrail.experiments.compare.plan import CompletedRun
from gradtrail.experiments.compare.report import as_markdown, draw_comparison, table_rows
from gradtrail.experiments.compare.statistics import Summary, are_times_comparable, summarize
from gradtrail.stages.common import plotting
from gradtrail.support.significance import Difference, paired_difference

LABELS = ("plain", "better", "same", "other")
PLAIN, BETTER, SAME = [0.900, 0.910, 0.895], [0.921, 0.930, 0.9155], [0.901, 0.9095, 0.8945]


def completed(
    label: str, accuracies: list[float], *, seconds: float | None = 2.0, first: int = 0, machine: str = "GenuineIntel-6"
) -> list[CompletedRun]:
    """Return runs that were trained in turn, those of a seed within a minute; their times vary by a little."""
    began = {seed: 60.0 * seed + 5 * LABELS.index(label) for seed in range(first, first + len(accuracies))}
    return [
        CompletedRun(
            variant=label,
            seed=seed,
            test_accuracy=accuracy,
            test_balanced_accuracy=None,
            test_accuracy_corrected_labels=None,
            test_loss=1 - accuracy,
            num_parameters=7,
            train_seconds=None if seconds is None else seconds + 0.01 * ((seed + LABELS.index(label)) % 3 - 1),
            cost=None,
            compile_seconds=None if seconds is None else 0.5,
            began=began[seed],
            ended=began[seed] + 4,
            machine=machine,
            dataset="digits 01234567",
            mlflow_run=f"{label}{seed}",
        )
        for seed, accuracy in enumerate(accuracies, start=first)
    ]


def of(*runs: list[CompletedRun]) -> dict[str, Summary]:
    summaries = summarize([one for part in runs for one in part], "plain")
    return {summary.variant: summary for summary in summaries}


def test_variants_are_compared_with_the_first_in_pairs() -> None:
    summaries = of(completed("plain", PLAIN), completed("better", BETTER, seconds=1.0), completed("same", SAME))
    assert summaries["better"].difference == paired_difference(BETTER, PLAIN, num_comparisons=2)
    assert summaries["same"].difference == paired_difference(SAME, PLAIN, num_comparisons=2)
    assert [summary.verdict for summary in summaries.values()] == [
        "baseline",
        "significant",
        "not significant",
    ]
    ratio = summaries["better"].log_time_ratio
    assert ratio is not None
    assert ratio.mean == pytest.approx(math.log(0.5), abs=0.01)
    assert ratio.is_significant
    assert "× baseline |" in as_markdown([*summaries.values()], "")
    in_blocks = [replace(run, began=run.began + 600, ended=run.ended + 600) for run in completed("better", BETTER)]
    assert "× baseline |" not in as_markdown([*of(completed("plain", PLAIN), in_blocks).values()], ""), "drift"


def test_single_variant_and_single_seeds_have_no_columns_of_differences() -> None:
    (row,) = table_rows(summarize(completed("plain", PLAIN), None))
    assert [*row] == ["variant", "seeds", "test accuracy, %", "test loss", "training, s", "compile, s"]
    assert row["test accuracy, %"] == "90.17 ± 0.76"
    priced = [replace(run, cost=0.125 * run.seed or None) for run in completed("plain", PLAIN)]
    assert table_rows(summarize(priced, None))[0]["cost"] == "0.375", "the sum of what is known"
    summaries = [*of(completed("plain", PLAIN[:1]), completed("better", BETTER[:1])).values()]
    assert "verdict" not in table_rows(summaries)[0]
    assert table_rows(summaries)[1]["difference, points"] == "+2.10"


def test_single_seed_has_no_verdict_and_no_effect_on_the_adjustment() -> None:
    summaries = of(
        completed("plain", PLAIN),
        completed("better", BETTER),
        completed("same", SAME[:1]),
        completed("other", SAME, first=7),
    )
    assert summaries["same"].verdict == "unknown: one seed"
    assert summaries["other"].verdict == "unknown: no seed in common"
    assert summaries["better"].difference == paired_difference(BETTER, PLAIN)


@pytest.mark.parametrize(
    ("low", "high", "p_value", "cells"),
    [
        (0.00002, 0.003, 0.0499, "+0.10 (+0.002 to +0.30) | significant"),
        (-0.00002, 0.003, 0.0501, "+0.10 (−0.002 to +0.30) | not significant"),
        (-0.003, 0.0, 0.05, "+0.10 (−0.30 to 0.00) | not significant"),
    ],
)
def test_rounding_keeps_the_side_of_zero(low: float, high: float, p_value: float, cells: str) -> None:
    summaries = of(completed("plain", PLAIN), completed("same", SAME))
    difference = Difference(mean=0.001, low=low, high=high, p_value=p_value, num_pairs=3)
    assert f"| {cells} |" in as_markdown([summaries["plain"], replace(summaries["same"], difference=difference)], "")


@pytest.mark.parametrize(
    ("changes", "is_comparable"),
    [
        ({}, True),
        ({"machine": "AuthenticAMD-26"}, False),
        ({"machine": None}, False),
        ({"train_seconds": None}, False),
        ({"began": 3.0}, False),
        ({"began": 3000.0, "ended": 3004.0}, False),  # the other seed was trained in between
        ({"began": 9000.0, "ended": 9004.0}, False),
        ({"began": 62.0, "ended": 64.0}, False),  # beside a run of the other seed
    ],
)
def test_times_are_comparable_for_runs_in_turn_on_one_kind_of_machine(
    changes: dict[str, Any], is_comparable: bool
) -> None:
    plain, (better, rest) = completed("plain", PLAIN[:2]), completed("better", BETTER[:2])
    better = replace(better, **changes)
    assert are_times_comparable(better, plain[0], [*plain, better, rest]) == is_comparable
    assert are_times_comparable(plain[0], better, [*plain, better, rest]) == is_comparable


def drawn(summaries: list[Summary], path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """Draw a comparison; return the figure in place of its file."""
    figures: list[Figure] = []
    monkeypatch.setattr(plotting, "save", lambda figure, _: figures.append(figure))
    draw_comparison(path, summaries, "which")
    return figures[0]


def test_bar_reaches_the_baseline_if_and_only_if_not_significant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the seeds that both have are not all: then the means of all seeds differ by another amount."""
    summaries = of(completed("plain", [*PLAIN, 0.5]), completed("better", BETTER), completed("same", SAME))
    accuracy = drawn(list(summaries.values()), tmp_path / "a.png", monkeypatch).axes[0]
    bars = [bar for bar in accuracy.containers if isinstance(bar, ErrorbarContainer) and bar.has_xerr]
    line = 100 * summaries["plain"].mean
    spans = [bar.lines[2][0].get_segments()[0][:, 0] for bar in bars]
    assert [not low <= line <= high for low, high in spans] == [True, False]
    assert [summaries[label].verdict for label in ("better", "same")] == ["significant", "not significant"]
