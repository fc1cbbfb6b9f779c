"""What a comparison says: pairs by seed, a verdict for each variant; the same as table, words, Markdown and picture."""

import io
import math
from pathlib import Path

import pytest
from drawing import assert_same_png_twice
from rich.console import Console

from gradtrail.experiments.sweep.render import answer, as_frame, as_markdown, as_table, draw_comparison
from gradtrail.experiments.sweep.runs import CompletedRun
from gradtrail.experiments.sweep.spec import Comparison, PlannedRun
from gradtrail.experiments.sweep.stats import Summary, paired_difference, summarize

LABELS = ("plain", "better", "same", "other")
COMPARISON = Comparison(about="which?", seeds=(0, 1, 2), variants={label: {} for label in LABELS})
PLAIN, BETTER, SAME = [0.900, 0.910, 0.895], [0.921, 0.930, 0.9155], [0.901, 0.9095, 0.8945]


def made(label: str, accuracies: list[float], *, seconds: float | None = 2.0, first: int = 0) -> list[CompletedRun]:
    return [
        CompletedRun(
            run=PlannedRun(label, seed),
            accuracy=accuracy,
            loss=1 - accuracy,
            seconds=seconds,
            compile_seconds=None if seconds is None else 0.5,
            dataset="digits 01234567",
            row=f"{label}{seed}",
        )
        for seed, accuracy in enumerate(accuracies, start=first)
    ]


def of(*runs: list[CompletedRun]) -> dict[str, Summary]:
    summaries = summarize([one for part in runs for one in part], COMPARISON)
    return {summary.label: summary for summary in summaries}


def test_each_variant_is_held_against_the_first_in_pairs_and_p_is_adjusted() -> None:
    found = of(made("plain", PLAIN), made("better", BETTER, seconds=1.0), made("same", SAME))
    raw = {"better": paired_difference(BETTER, PLAIN), "same": paired_difference(SAME, PLAIN)}
    assert found["better"].difference == raw["better"]
    assert found["better"].p_value == pytest.approx(2 * raw["better"].p_value)
    assert found["same"].p_value == raw["same"].p_value == pytest.approx(1)
    assert [each.verdict for each in found.values()] == ["baseline", "more than chance", "no more than chance"]
    assert (found["better"].time_ratio, found["better"].loss) == (0.5, pytest.approx(1 - sum(BETTER) / 3))


def test_only_seeds_that_both_have_make_pairs() -> None:
    found = of(made("plain", PLAIN), made("better", [0.93, 0.92], first=1))
    assert found["better"].difference == paired_difference([0.93, 0.92], PLAIN[1:])
    assert [one.run.seed for one in found["better"].runs] == [1, 2]


def test_one_seed_cannot_say_and_does_not_count_in_the_adjustment() -> None:
    found = of(made("plain", PLAIN), made("better", BETTER), made("same", SAME[:1]), made("other", SAME, first=7))
    assert found["same"].verdict == "one seed: cannot say"
    assert found["other"].verdict == "no seed in common: cannot say"
    assert found["better"].p_value == found["better"].difference.p_value  # type: ignore[union-attr]
    assert math.isnan(found["same"].p_value)


def test_the_table_has_all_figures() -> None:
    summaries = list(of(made("plain", PLAIN), made("better", BETTER, seconds=1.0), made("other", [0.9])).values())
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_table(summaries, "which?"))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "which?"
    assert "plain 0, 1, 2 90.17 ± 0.76 baseline 0.0983 2.0 1.00 0.5" in lines
    assert "better 0, 1, 2 92.22 ± 0.73 +2.05 (+1.93 to +2.17) < 0.001 more than chance 0.0778 1.0 0.50 0.5" in lines
    assert "other 0 90.00 0.00 one seed: cannot say 0.1000 2.0 1.00 0.5" in lines


def test_times_that_nobody_took_have_no_column() -> None:
    summaries = list(of(made("plain", PLAIN, seconds=None), made("same", SAME, seconds=None)).values())
    text = as_markdown(summaries, "", "")
    assert "training" not in text
    assert "compile" not in text
    assert "trains" not in text


def test_markdown_has_question_table_and_answer() -> None:
    summaries = list(of(made("plain", PLAIN), made("same", SAME)).values())
    lines = as_markdown(summaries, "**which?**", "how to read it").splitlines()
    assert lines[0] == "**which?**"
    rows = [line for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert rows[3].startswith("| same | 0, 1, 2 | 90.17 ± 0.75 | 0.00 (−0.22 to +0.22) | 1.000 | no more than chance |")
    assert lines[-3:] == [answer(summaries), "", "how to read it"]


def test_the_answer_of_few_variants_is_a_sentence_each() -> None:
    found = of(made("plain", PLAIN), made("better", BETTER, seconds=1.25), made("same", [0.9]))
    first, second = answer(list(found.values())).split(". ")
    assert first.startswith("better differs from plain by +2.05 points (+1.93 to +2.17): more than chance")
    assert first.endswith("; it trains 1.6 × as fast")
    assert second == "same differs from plain by 0.00 points: one seed: cannot say; it trains as fast."


def test_the_answer_of_many_variants_goes_by_verdict() -> None:
    found = of(made("plain", PLAIN), made("same", SAME), made("better", BETTER), made("other", [0.9]))
    assert answer(list(found.values())) == (
        "Beside plain, in points of test accuracy: more than chance: better (+2.05); "
        "no more than chance: same (0.00); one seed: cannot say: other (0.00)."
    )


def test_where_the_baseline_failed_the_rest_is_shown() -> None:
    summaries = list(of(made("better", BETTER)).values())
    assert answer(summaries) == "There is nothing to compare yet."
    assert "92.22" in as_markdown(summaries, "", "")


def test_the_runs_are_a_line_each() -> None:
    frame = as_frame([*made("plain", PLAIN), *made("other", [0.5], seconds=None)])
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


@pytest.mark.parametrize("seconds", [None, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_picture(count: int, seconds: float | None, tmp_path: Path) -> None:
    runs = [made("plain", PLAIN[:count], seconds=seconds), made("better", BETTER[:count], seconds=seconds)]
    summaries = list(of(*runs, made("other", [0.9], first=9)).values())
    assert_same_png_twice(lambda path: draw_comparison(path, summaries, "which"), tmp_path)
