"""Figures of gradients show the tables and the analysis they are drawn from."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from factories import gradients_config, random_split
from stage_results import gradient_analysis, learning_dynamics

from gradtrail.core.common.split import Split
from gradtrail.core.gradients.analysis import GradientAnalysis
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.gradients import figures, tables
from gradtrail.stages.gradients.tables import Tables

NUM_EXAMPLES = 40


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
def result() -> tuple[dict[str, Split], GradientAnalysis, Tables]:
    return analyzed(NUM_EXAMPLES, noisy=True)


@pytest.mark.parametrize("noisy", [False, True])
def test_detection_is_drawn_if_labels_are_wrong(noisy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved: list[str] = []
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.append(path.relative_to(tmp_path).stem))
    splits, analysis, rows = analyzed(6, noisy=noisy)
    figures.draw(tmp_path, rows, analysis, splits, "a title", 128)
    always = {"histograms", "relations", "largest", "course", "classes", "influence"}
    assert set(saved) == {*always, "suspects_train", "suspects_test", *(["label_error_scores"] if noisy else [])}
