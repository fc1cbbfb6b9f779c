"""Scores of several members are the means over the members, compared with NumPy."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
from factories import gradients_config, random_split
from stage_results import gradient_analysis, learning_dynamics

from gradtrail.core.gradients.analysis import GradientAnalysis, epoch_column
from gradtrail.stages.artifacts.members import over_members
from gradtrail.stages.gradients import tables
from gradtrail.stages.gradients.members import WITH_ERROR, MeanScores, Members

SIZES = {"train": 30, "validation": 6, "test": 9}
SPLITS = {name: random_split(size) for name, size in SIZES.items()}
CONFIG = gradients_config()
SEEDS = (4, 5, 6)


def analysis(seed: int) -> GradientAnalysis:
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
    return dataclasses.replace(drawn, scores=scores)


def scores_of(seed: int) -> pd.DataFrame:
    return tables.score_table(SPLITS, analysis(seed).scores, learning_dynamics(SIZES["train"]))


def added(folder: Path, seeds: tuple[int, ...]) -> Members:
    members = Members(folder)
    for seed in seeds:
        made = tables.make_tables(scores_of(seed), analysis(seed), CONFIG)
        members.add(seed, made, analysis(seed), {"float64_error/loss": seed / 10})
    return members


def test_every_score_is_the_mean_and_the_main_ones_have_its_standard_error() -> None:
    mean, tables_of_members = MeanScores(), [scores_of(seed) for seed in SEEDS]
    for scores in tables_of_members:
        mean.add(scores)
    means = mean.table()
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


def test_prediction_is_that_of_most_members_or_the_first_of_several() -> None:
    mean, scores = MeanScores(), scores_of(SEEDS[0])
    votes = np.resize(np.array([[0, 1, 1, 2], [1, 2, 2, 0], [2, 1, 0, 0]]), (3, len(scores)))
    for predicted in votes.astype(np.int32):
        mean.add(scores.assign(predicted=predicted))
    means = mean.table()
    expected = [np.bincount(column).argmax() for column in votes.T]
    assert means["predicted"].tolist() == expected
    assert means["correct"].tolist() == (np.array(expected) == scores["label"]).tolist()


def test_each_member_is_on_disk_and_the_metrics_are_over_their_own(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    members_of_three = added(tmp_path / "scratch", SEEDS)
    (tmp_path / "results").mkdir()
    members_of_three.write(tmp_path / "results")
    for seed in SEEDS:
        written = pd.read_parquet(tmp_path / "results" / "members" / f"seed_{seed}.parquet")
        pd.testing.assert_frame_equal(written, scores_of(seed))
    member_metrics = [
        tables.measure(tables.make_tables(scores_of(seed), analysis(seed), CONFIG), analysis(seed)) for seed in SEEDS
    ]
    assert members_of_three.metrics() == over_members(member_metrics)
    assert members_of_three.errors == {"float64_error/loss": 0.6}
    assert members_of_three.first.scores["test"].keys() == analysis(SEEDS[0]).scores["test"].keys()


def test_single_member_has_its_own_tables_and_no_folder(tmp_path: Path) -> None:
    single = added(tmp_path, SEEDS[:1])
    pd.testing.assert_frame_equal(single.tables(CONFIG).scores, scores_of(SEEDS[0]))
    single.write(tmp_path / "results")
    assert not (tmp_path / "results").exists()
