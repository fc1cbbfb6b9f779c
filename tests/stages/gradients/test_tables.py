"""Tables of gradients, and their summary, on random analyses."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import gradients_config, random_split
from stage_results import gradient_analysis, learning_dynamics

from gradtrail.core.data import Split
from gradtrail.core.gradients.exact import LIMITS
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.gradients import figures, summary
from gradtrail.stages.gradients import tables as score_tables
from gradtrail.stages.gradients.tables import SUSPICION, Tables, detection_table, rank_suspects

SIZES = {"train": 30, "validation": 6, "test": 9}
ANALYSIS, DYNAMICS = gradient_analysis(SIZES), learning_dynamics(30)
CONFIG = gradients_config()


def splits(*, wrong: int = 0) -> dict[str, Split]:
    by_name = {name: random_split(size) for name, size in SIZES.items()}
    labels = by_name["train"].labels.copy()
    labels[:wrong] = (labels[:wrong] + 1) % 3
    return by_name | {"train": dataclasses.replace(by_name["train"], labels=labels)}


@functools.cache
def tables(*, wrong: int = 0) -> Tables:
    return score_tables.make_tables(table(wrong=wrong), ANALYSIS, CONFIG)


def table(*, wrong: int = 0) -> pd.DataFrame:
    return score_tables.score_table(splits(wrong=wrong), ANALYSIS.scores, DYNAMICS)


def test_score_table_has_every_example_and_dynamics_of_training_examples() -> None:
    rows = table()
    assert rows["split"].value_counts().to_dict() == SIZES
    trained = rows["split"] == "train"
    np.testing.assert_array_equal(rows.loc[trained, "forgetting_events"], DYNAMICS["forgetting_events"])
    assert rows.loc[~trained, ["forgetting_events", "mean_probability"]].isna().all().all()
    np.testing.assert_array_equal(rows["correct"], rows["label"] == rows["predicted"])


def test_suspicion_is_one_minus_mean_probability() -> None:
    rows = table()
    trained = rows["split"] == "train"
    np.testing.assert_allclose(rows.loc[trained, SUSPICION], 1 - DYNAMICS["mean_probability"], rtol=1e-6)
    np.testing.assert_allclose(rows.loc[~trained, SUSPICION], 1 - rows.loc[~trained, "probability_mean"], rtol=1e-6)
    ranked = rank_suspects(rows, "test", 4)
    assert len(ranked) == 4
    assert ranked[SUSPICION].is_monotonic_decreasing
    assert ranked[SUSPICION].iloc[0] == rows.loc[rows["split"] == "test", SUSPICION].max()


def test_detection_is_perfect_if_wrong_labels_score_highest() -> None:
    rows = table(wrong=6)
    train = rows[rows["split"] == "train"].reset_index(drop=True)
    place = np.arange(30)
    train = train.assign(mean_probability=(place / 30), grad_norm_mean=-place, el2n_mean=place)
    result = detection_table(train).set_index(["score", "epoch"])
    assert result.loc[("mean_probability", ""), ["auroc", "average_precision", "precision"]].tolist() == [1, 1, 1]
    assert result.loc[("grad_norm", "mean"), "auroc"] == 1
    assert result.loc[("el2n", "mean"), ["auroc", "precision", "false_negative_rate"]].tolist() == [0, 0, 1]
    assert {"0", "2", "mean"} <= {epoch for _, epoch in result.index}
    swapped = train.assign(mean_probability=np.where(place == 5, 6.5, place))  # one behind the first right label
    row = detection_table(swapped).set_index("score").loc["mean_probability"]
    assert row["precision"] == pytest.approx(5 / 6)
    assert row["false_negative_rate"] == pytest.approx(1 / 6)
    assert row["auroc"] == pytest.approx(1 - 1 / (6 * 24))


def test_influences_are_the_strongest_on_either_side_in_order() -> None:
    influences = score_tables.influence_table(table(), ANALYSIS)
    for column, position in enumerate(ANALYSIS.influenced):
        rows = influences[influences["test_example"] == position]
        influence = np.sort(ANALYSIS.influence[:, column])
        np.testing.assert_allclose(rows.loc[rows["effect"] == "helped", "influence"], influence[::-1][:5])
        np.testing.assert_allclose(rows.loc[rows["effect"] == "hurt", "influence"], influence[:5])
        for row in rows.itertuples():
            assert ANALYSIS.influence[row.train_example, column] == pytest.approx(row.influence)


def test_histogram_of_norms_has_every_example_once_in_bins_that_no_run_changes() -> None:
    rows = table()
    rows.loc[0, "grad_norm"], rows.loc[1, "grad_norm"], rows.loc[2, "grad_norm"] = 0.0, 1e9, 1e-3 * 1.01
    result = score_tables.norm_table(rows)
    assert list(result) == ["log10_norm", "train", "validation", "test"]
    np.testing.assert_allclose(result[list(SIZES)].sum(), 1)
    np.testing.assert_allclose(np.diff(result["log10_norm"]), 0.25)
    assert result["train"].iloc[0] >= 1 / 30
    assert result["train"].iloc[-1] >= 1 / 30
    assert result.loc[np.isclose(result["log10_norm"], -2.875), "train"].item() >= 1 / 30
    pd.testing.assert_series_equal(result["log10_norm"], score_tables.norm_table(rows[3:])["log10_norm"])


def test_tables_are_written_and_metrics_are_finite(tmp_path: Path) -> None:
    score_tables.write_tables(tmp_path / "out", tables(wrong=6), {"float64_error/loss": 2e-6})
    written = {path.name for path in (tmp_path / "out").iterdir()}
    names = ("largest", "suspects", "label_error_scores", "splits", "norms", "noise_scale", "classes", "influence")
    assert written == {"scores.parquet", *(f"{name}.csv" for name in (*names, "float64_errors"))}
    largest = pd.read_csv(tmp_path / "out" / "largest.csv")
    assert largest["grad_norm"].tolist() == pytest.approx(sorted(table()["grad_norm"])[::-1][:4], rel=1e-5)
    metrics = score_tables.measure(tables(wrong=6), ANALYSIS)
    assert np.isfinite(list(metrics.values())).all()
    assert (
        tmp_path / "out" / "float64_errors.csv"
    ).read_text() == "score,largest_sampled_error_over_value_or_rms\nloss,2e-06\n"
    splits = pd.read_csv(tmp_path / "out" / "splits.csv", index_col="split")
    assert set(splits.index) == set(SIZES)
    assert metrics["test_grad_norm_median"] == pytest.approx(splits.at["test", "grad_norm_median"], rel=1e-5)
    assert {"label_errors_auroc", "never_correct", "test_grad_norm_median"} <= set(metrics)


@pytest.mark.parametrize("wrong", [0, 6])
def test_detection_is_drawn_if_labels_are_wrong(wrong: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved: list[str] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.append(path.relative_to(tmp_path).stem))
    figures.draw(tmp_path, tables(wrong=wrong), ANALYSIS, splits(wrong=wrong), "a title", 128)
    always = {"histograms", "relations", "largest", "course", "classes", "influence"}
    assert set(saved) == {*always, "suspects_train", "suspects_test", *(["label_error_scores"] if wrong else [])}


@pytest.mark.parametrize("wrong", [0, 6])
@pytest.mark.parametrize("batch_size", [1, 3, 128])
def test_summary_agrees_with_tables(wrong: int, batch_size: int) -> None:
    made_tables = tables(wrong=wrong)
    metrics = score_tables.measure(made_tables, ANALYSIS)
    words = summary.summarize("a title", made_tables, ANALYSIS, metrics, CONFIG, batch_size, (0,))
    train = made_tables.train
    assert words.startswith("# Summary of per-example gradients: a title\n\n## Largest gradients\n")
    assert f"The largest norms are those of #{train.loc[train['grad_norm'].idxmax(), 'example_id']} (label " in words
    suspect = rank_suspects(made_tables.scores, "train", 1)["example_id"].iloc[0]
    assert f"lowest mean probability over the training are those of #{suspect} (label " in words
    assert "3 (2.5 to 3.5) at epoch 0, unbounded at epoch 2" in words
    verdict = {1: "less than half of that", 3: "close to that", 128: "more than twice that"}[batch_size]
    assert f"A typical value is 3; the batch size {batch_size} is {verdict}" in words
    assert ("AUROC" in words) == (wrong > 0)


@pytest.mark.parametrize(("error", "precision"), [(2e-3, "float32"), (0.2, "float16"), (float("nan"), "bfloat16")])
def test_error_beyond_the_precision_costs_a_warning(
    error: float, precision: Precision, capsys: pytest.CaptureFixture[str]
) -> None:
    summary.warn_of_errors({"float64_error/loss": LIMITS[precision], "float64_error/el2n": 0.0}, precision)
    assert capsys.readouterr().err == ""
    summary.warn_of_errors({"float64_error/el2n": 0.0, "float64_error/loss": error}, precision)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradients: warning: loss differs from its float64 value by ")
    assert line.endswith(f" is usual for {precision}")
