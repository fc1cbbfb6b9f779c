"""Figures of gradients show the tables and the analysis they are drawn from."""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from drawing import cells, heights, legend_of, lines, names, points
from factories import SHAPE, gradients_config, random_split
from stage_results import gradient_analysis, learning_dynamics

from gradtrail.core.common.split import Split
from gradtrail.core.gradients.analysis import GradientAnalysis, epoch_column
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.gradients import figures, tables
from gradtrail.stages.gradients.tables import SUSPICION, Tables

NUM_EXAMPLES = 40
SIDES = ("correct", True), ("misclassified", False)


def analyzed(num_examples: int, *, noisy: bool = False) -> tuple[dict[str, Split], GradientAnalysis, Tables]:
    """Splits, their analysis and its tables; `noisy`: all training labels but the first are wrong."""
    splits = {name: random_split(num_examples) for name in ("train", "test")}
    if noisy:
        labels = splits["train"].labels
        true_labels = np.where(np.arange(num_examples) == 0, labels, (labels + 1) % 3).astype(np.int32)
        splits["train"] = dataclasses.replace(splits["train"], true_labels=true_labels)
    analysis = gradient_analysis({name: len(split) for name, split in splits.items()})
    scores = tables.score_table(splits, analysis.scores, learning_dynamics(num_examples))
    return splits, analysis, tables.make_tables(scores, analysis, gradients_config())


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Split], GradientAnalysis, Tables]:
    return analyzed(NUM_EXAMPLES, noisy=True)


@pytest.mark.parametrize("noisy", [False, True])
def test_scores_that_find_wrong_labels_are_drawn_where_there_are_some(
    noisy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[str] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.append(path.relative_to(tmp_path).stem))
    splits, analysis, rows = analyzed(6, noisy=noisy)
    figures.draw(tmp_path, rows, analysis, splits, "a title", 128)
    always = {"histograms", "relations", "largest", "course", "classes", "influence"}
    assert set(saved) == {*always, "suspects_train", "suspects_test", *(["label_error_scores"] if noisy else [])}


def test_what_there_is_of_one_example_can_be_drawn() -> None:
    splits, analysis, rows = analyzed(1)
    figures.draw_histograms(rows.scores, "a title").draw_without_rendering()
    figures.draw_relations(rows.scores, "a title").draw_without_rendering()
    figures.draw_course(rows, analysis, "a title", 128).draw_without_rendering()
    assert len(cells(figures.draw_largest(rows.largest, splits, "a title"), SHAPE)) == 2
    assert len(cells(figures.draw_influence(rows.influence, splits, "a title"), SHAPE)) == 3


def test_histograms_have_every_example(found: tuple[dict[str, Split], GradientAnalysis, Tables]) -> None:
    scores = found[2].scores
    by_split, by_side = figures.draw_histograms(scores, "a title").axes
    assert legend_of(by_split) == ["train", "test"]
    assert legend_of(by_side) == [f"{name} ({np.sum(scores['correct'] == is_correct)})" for name, is_correct in SIDES]
    edges = np.geomspace(scores["grad_norm"].min(), scores["grad_norm"].max() * 1.0001, 80)
    for patch, (_, part) in zip(by_split.patches, scores.groupby("split", observed=True), strict=True):
        assert patch.get_xy()[:, 1].max() == pytest.approx(100 * np.histogram(part["grad_norm"], edges)[0].max() / 40)
    for patch, (_, is_correct) in zip(by_side.patches, SIDES, strict=True):
        norms = scores.loc[scores["correct"] == is_correct, "grad_norm"]
        assert patch.get_xy()[:, 1].max() == np.histogram(norms, edges)[0].max()
    assert {axis.get_xscale() for axis in (by_split, by_side)} == {"log"}


def test_relations_have_a_point_for_each_example(found: tuple[dict[str, Split], GradientAnalysis, Tables]) -> None:
    scores = found[2].scores
    axes = figures.draw_relations(scores, "a title").axes
    assert [names(axis)[1] for axis in axes] == ["loss in nats", "margin in logits", "input norm"]
    for axis, column in zip(axes, ("loss", "margin", "input_norm"), strict=True):
        assert legend_of(axis) == ["correct", "misclassified"]
        drawn = [line for line in axis.lines if len(line.get_xdata())]
        for line, (_, is_correct) in zip(drawn, SIDES, strict=True):
            np.testing.assert_array_equal(
                points(line), scores.loc[scores["correct"] == is_correct, [column, "grad_norm"]]
            )


def test_galleries_have_the_images_that_their_captions_name(
    found: tuple[dict[str, Split], GradientAnalysis, Tables],
) -> None:
    splits, _, rows = found
    largest = cells(figures.draw_largest(rows.largest, splits, "a title"), SHAPE)
    suspects = cells(figures.draw_suspects(rows.suspects["train"], splits, "a title"), SHAPE)
    assert len(largest) == len(rows.largest)
    assert len(suspects) == len(rows.suspects["train"])
    for (caption, image), row in zip(largest, rows.largest.itertuples(), strict=True):
        assert caption.startswith(
            f"{row.split} #{row.example_id}\n{row.label} → {row.predicted}  ‖g‖ {row.grad_norm:.1f}"
        )
        np.testing.assert_array_equal(image, splits[row.split].images[row.example_id])
    for (caption, image), row in zip(suspects, rows.suspects["train"].itertuples(), strict=True):
        true = f" (true {row.true_label})" if row.true_label != row.label else ""
        assert caption == f"train #{row.example_id}\n{row.label} → {row.predicted}{true}  {row.probability:.0%}"
        np.testing.assert_array_equal(image, splits["train"].images[row.example_id])


def test_influences_have_a_row_for_each_test_example(found: tuple[dict[str, Split], GradientAnalysis, Tables]) -> None:
    splits, _, rows = found
    shown = cells(figures.draw_influence(rows.influence, splits, "a title"), SHAPE)
    for start, (name, part) in zip((0, 11), rows.influence.groupby("test_example", sort=False), strict=True):
        first, *others = shown[start : start + 11]
        assert first[0].startswith(f"test #{name}\n")
        np.testing.assert_array_equal(first[1], splits["test"].images[int(str(name))])
        for (caption, image), row in zip(others, part.itertuples(), strict=True):
            assert caption == f"{row.effect} #{row.train_example}\n{row.train_label}  {row.influence:+.2g}"
            np.testing.assert_array_equal(image, splits["train"].images[row.train_example])


def test_noise_scales_that_are_finite_and_rank_correlations_are_drawn_by_epoch(
    found: tuple[dict[str, Split], GradientAnalysis, Tables],
) -> None:
    _, analysis, rows = found
    noise, ranks = figures.draw_course(rows, analysis, "a title", 128).axes
    (bars,) = noise.containers
    assert points(bars.lines[0]).tolist() == [[0, 3]], "at epoch 2 the noise scale is infinite"
    assert bars.lines[2][0].get_segments()[0].tolist() == [[0, 2.5], [0, 3.5]]
    assert lines(noise)["batch size 128"].get_ydata() == [128, 128]
    assert noise.get_xlim() == ranks.get_xlim(), "so that a missing epoch is seen"
    others = {"input norm": "input_norm", "‖∇ℓᵢ‖ at epoch 2": epoch_column("grad_norm", 2), "suspicion": SUSPICION}
    for label, column in others.items():
        expected = [
            rows.train[epoch_column("grad_norm", epoch)].corr(rows.train[column], "spearman") for epoch in (0, 2)
        ]
        np.testing.assert_allclose(points(lines(ranks)[label]), list(zip((0, 2), expected, strict=True)), atol=1e-9)


def test_classes_have_two_matrices_with_colours_around_zero_and_a_bar_each(
    found: tuple[dict[str, Split], GradientAnalysis, Tables],
) -> None:
    classes = found[1].classes
    cosine, coherence, share, *colour_bars = figures.draw_classes(found[1], "a title").axes
    for axis, matrix in ((cosine, classes.cosine), (coherence, classes.coherence)):
        np.testing.assert_array_equal(axis.images[0].get_array(), matrix)
        assert axis.images[0].get_clim() == pytest.approx((-np.abs(matrix).max(), np.abs(matrix).max()))
    assert len(colour_bars) == 2
    assert next(iter(heights(share).values())) == pytest.approx((100 * classes.share).tolist())
    assert [names(axis)[0] for axis in (cosine, coherence, share)] == [
        *(
            "cosine of the mean gradients",
            "coherence of per-example gradients",
            "share of a gradient step's decrease in loss",
        ),
    ]


def test_detection_has_a_line_for_each_score_the_best_on_top(
    found: tuple[dict[str, Split], GradientAnalysis, Tables],
) -> None:
    table: pd.DataFrame = found[2].label_error_scores
    (axis,) = figures.draw_detection(table, "a title").axes
    places = np.arange(len(table))[::-1]
    for label, column in (("average precision", "average_precision"), ("AUROC", "auroc")):
        np.testing.assert_array_equal(points(lines(axis)[label]), np.column_stack([table[column], places]))
    written = [label.get_text().split()[0] for label in axis.get_yticklabels()]
    assert written == table["score"].tolist()
