"""Tables of gradients and their summary, on random analyses; those of several members are means over them."""

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import gradients_config, random_split
from stage_results import gradient_analysis, learning_dynamics

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import GradientAnalysis, epoch_column
from gradtrail.stages.common import plotting
from gradtrail.stages.gradients import figures, outputs, summary
from gradtrail.stages.gradients.outputs import (
    SUSPICION,
    WITH_ERROR,
    Results,
    detection_table,
    mean_scores,
    rank_suspects,
)
from gradtrail.stages.model.members import over_members

SIZES = {"train": 30, "validation": 6, "test": 9}
ANALYSIS, DYNAMICS = gradient_analysis(SIZES), learning_dynamics(30)
CONFIG = gradients_config()
CLASSES = ("cat", "dog", "a $ and a $")


def splits(*, wrong: int = 0) -> dict[str, Split]:
    by_name = {name: random_split(size) for name, size in SIZES.items()}
    labels = by_name["train"].labels.copy()
    labels[:wrong] = (labels[:wrong] + 1) % 3
    return by_name | {"train": dataclasses.replace(by_name["train"], labels=labels)}


def table(*, wrong: int = 0) -> pd.DataFrame:
    return outputs.score_table(splits(wrong=wrong), ANALYSIS.scores, DYNAMICS)


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
    result = detection_table(train, (0, 2)).set_index(["score", "epoch"])
    assert result.loc[("mean_probability", ""), ["auroc", "average_precision", "precision"]].tolist() == [1, 1, 1]
    assert result.loc[("grad_norm", "mean"), "auroc"] == 1
    assert result.loc[("el2n", "mean"), ["auroc", "precision", "false_negative_rate"]].tolist() == [0, 0, 1]
    assert {"0", "2", "mean"} <= {epoch for _, epoch in result.index}
    swapped = train.assign(mean_probability=np.where(place == 5, 6.5, place))  # one behind the first right label
    row = detection_table(swapped, (0, 2)).set_index("score").loc["mean_probability"]
    assert row["precision"] == pytest.approx(5 / 6)
    assert row["false_negative_rate"] == pytest.approx(1 / 6)
    assert row["auroc"] == pytest.approx(1 - 1 / (6 * 24))


def test_histogram_of_norms_has_every_example_once_in_bins_that_no_run_changes() -> None:
    rows = table()
    rows.loc[0, "grad_norm"], rows.loc[1, "grad_norm"], rows.loc[2, "grad_norm"] = 0.0, 1e9, 1e-3 * 1.01
    result = outputs.norm_table(rows)
    assert list(result) == ["log10_norm", "train", "validation", "test"]
    np.testing.assert_allclose(result[list(SIZES)].sum(), 1)
    np.testing.assert_allclose(np.diff(result["log10_norm"]), 0.25)
    assert result["train"].iloc[0] >= 1 / 30
    assert result["train"].iloc[-1] >= 1 / 30
    assert result.loc[np.isclose(result["log10_norm"], -2.875), "train"].item() >= 1 / 30
    pd.testing.assert_series_equal(result["log10_norm"], outputs.norm_table(rows[3:])["log10_norm"])


@functools.cache
def results(*, wrong: int = 0) -> Results:
    """The results of one member."""
    with tempfile.TemporaryDirectory() as scratch:
        return outputs.collect(
            [(0, table(wrong=wrong), ANALYSIS)], CONFIG, Path(scratch), classes=CLASSES, num_train=30
        )


def test_tables_are_written_and_metrics_are_finite(tmp_path: Path) -> None:
    results(wrong=6).write(tmp_path / "out")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out/scores.parquet"), table(wrong=6))
    written = {path.name for path in (tmp_path / "out").iterdir()}
    names = ("largest", "suspects", "label_error_scores", "splits", "norms", "noise_scale", "classes")
    assert written == {"scores.parquet", *(f"{name}.csv" for name in names)}
    largest = pd.read_csv(tmp_path / "out" / "largest.csv")
    assert largest["grad_norm"].tolist() == pytest.approx(sorted(table()["grad_norm"])[::-1][:4], rel=1e-5)
    metrics = results(wrong=6).metrics
    assert np.isfinite(list(metrics.values())).all()
    splits = pd.read_csv(tmp_path / "out" / "splits.csv", index_col="split")
    assert set(splits.index) == set(SIZES)
    assert metrics["test_grad_norm_median"] == pytest.approx(splits.at["test", "grad_norm_median"], rel=1e-5)
    assert {"label_errors_auroc", "never_correct", "test_grad_norm_median"} <= set(metrics)


@pytest.mark.parametrize("wrong", [0, 6])
def test_detection_is_drawn_if_labels_are_wrong(wrong: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved: list[str] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.append(path.relative_to(tmp_path).stem))
    figures.draw(tmp_path, results(wrong=wrong), splits(wrong=wrong), "a title", 128)
    always = {"histograms", "relations", "largest", "course", "classes"}
    assert set(saved) == {*always, "suspects_train", "suspects_test", *(["label_error_scores"] if wrong else [])}


@pytest.mark.parametrize(("wrong", "batch_size"), [(0, 1), (6, 3), (0, 128)])
def test_summary_agrees_with_tables(wrong: int, batch_size: int) -> None:
    words = summary.summarize("a title", results(wrong=wrong), CONFIG, batch_size)
    scores = results(wrong=wrong).tables.scores
    largest = scores.loc[scores[scores["split"] == "train"]["grad_norm"].idxmax()]
    assert words.startswith("# Summary of per-example gradients: a title\n\n## Largest gradients\n")
    assert f"The largest norms are those of #{largest['example_id']} (label {CLASSES[largest['label']]}" in words
    suspect = rank_suspects(scores, "train", 1)["example_id"].iloc[0]
    assert f"lowest mean probability over the training are those of #{suspect} (label " in words
    assert "3 (2.5 to 3.5) at epoch 0, unbounded at epoch 2" in words
    verdict = {1: "less than half of that", 3: "close to that", 128: "more than twice that"}[batch_size]
    assert f"A typical value is 3; the batch size {batch_size} is {verdict}" in words
    assert ("AUROC" in words) == (wrong > 0)


MEMBER_SPLITS = {name: random_split(size) for name, size in SIZES.items()}
SEEDS = (4, 5, 6)


def member_analysis(seed: int) -> GradientAnalysis:
    """That of a member, its scores drawn at random; the last was stopped early: it has no weights of epoch 2."""
    rng, drawn = np.random.default_rng(seed), gradient_analysis(SIZES)
    scores = {
        split: {
            name: rng.permutation(values)
            for name, values in columns.items()
            if seed < SEEDS[-1] or not name.endswith(epoch_column("", 2))
        }
        for split, columns in drawn.scores.items()
    }
    epochs = (0, 2) if seed < SEEDS[-1] else (0,)
    return dataclasses.replace(
        drawn, scores=scores, noise_scales={epoch: drawn.noise_scales[epoch] for epoch in epochs}
    )


def scores_of(seed: int) -> pd.DataFrame:
    return outputs.score_table(MEMBER_SPLITS, member_analysis(seed).scores, learning_dynamics(SIZES["train"]))


def collected(scratch: Path, seeds: tuple[int, ...]) -> Results:
    scratch.mkdir()
    members = [(seed, scores_of(seed), member_analysis(seed)) for seed in seeds]
    return outputs.collect(members, CONFIG, scratch, classes=CLASSES, num_train=30)


def written_means(folder: Path, scores: list[pd.DataFrame]) -> pd.DataFrame:
    paths = [folder / f"{number}.parquet" for number in range(len(scores))]
    for path, part in zip(paths, scores, strict=True):
        part.to_parquet(path, index=False)
    return mean_scores(paths)


def test_every_score_is_the_mean_and_the_main_ones_have_its_standard_error(tmp_path: Path) -> None:
    tables_of_members = [scores_of(seed) for seed in SEEDS]
    means = written_means(tmp_path, tables_of_members)
    numeric = tables_of_members[0].columns.drop(["split", "example_id", "label", "true_label", "predicted", "correct"])
    for name in numeric:
        values = np.array([scores[name] for scores in tables_of_members if name in scores], np.float64)
        np.testing.assert_allclose(means[name], values.mean(axis=0), rtol=1e-6, err_msg=name)
        assert (f"{name}_se" in means) == (name in WITH_ERROR)
        if name in WITH_ERROR:
            expected = values.std(axis=0, ddof=1) / np.sqrt(len(SEEDS))
            np.testing.assert_allclose(means[f"{name}_se"], expected, rtol=1e-5, atol=1e-7, err_msg=name)
    assert {*WITH_ERROR} <= {*numeric}
    pd.testing.assert_frame_equal(
        means[["split", "example_id", "label"]], tables_of_members[0][["split", "example_id", "label"]]
    )


def test_prediction_is_that_of_most_members_or_the_first_of_several(tmp_path: Path) -> None:
    scores = scores_of(SEEDS[0])
    votes = np.resize(np.array([[0, 1, 1, 2], [1, 2, 2, 0], [2, 1, 0, 0]]), (3, len(scores)))
    means = written_means(tmp_path, [scores.assign(predicted=predicted) for predicted in votes.astype(np.int32)])
    expected = [np.bincount(column).argmax() for column in votes.T]
    assert means["predicted"].tolist() == expected
    assert means["correct"].tolist() == (np.array(expected) == scores["label"]).tolist()


def test_each_member_is_on_disk_and_the_metrics_are_over_their_own(tmp_path: Path) -> None:
    results = collected(tmp_path / "scratch", SEEDS)
    results.write(tmp_path / "results")
    for seed in SEEDS:
        written = pd.read_parquet(tmp_path / "results" / "members" / f"seed_{seed}.parquet")
        pd.testing.assert_frame_equal(written, scores_of(seed))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "results" / "scores.parquet"), results.tables.scores)
    assert "suspicion_se" in results.tables.scores
    member_metrics = [
        outputs.measure(outputs.make_tables(scores_of(seed), member_analysis(seed), CONFIG), member_analysis(seed))
        for seed in SEEDS
    ]
    assert results.metrics == over_members(member_metrics)
    assert results.analysis.scores["test"].keys() == member_analysis(SEEDS[0]).scores["test"].keys()


def test_single_member_has_its_own_tables_and_no_folder(tmp_path: Path) -> None:
    results = collected(tmp_path / "scratch", SEEDS[:1])
    results.write(tmp_path / "results")
    pd.testing.assert_frame_equal(results.tables.scores, scores_of(SEEDS[0]))
    assert not (tmp_path / "results" / "members").exists()
