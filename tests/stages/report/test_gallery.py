"""The gallery has every example once, with its image, scores and groups; the matrix leads to them."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_folder import EXAMPLES, render_page

from gradtrail.stages.report.gallery import make_gallery, mistakes
from gradtrail.stages.report.numbers import Row, confusion_matrix, read_sources


def examples_of(folder: Path) -> dict[str, Row]:
    examples = make_gallery(read_sources(folder)).examples
    return {f"{example['split']}-{example['example_id']}": example for example in examples}


def test_each_example_is_there_once_with_its_groups_and_its_own_image(folder: Path) -> None:
    sources = read_sources(folder)
    gallery = make_gallery(sources)
    assert {(example["split"], example["example_id"]): example["groups"] for example in gallery.examples} == {
        ("test", 720): ["mistakes", "largest"],
        ("test", 1226): ["mistakes", "suspects"],
        ("test", 2654): ["mistakes"],
        ("train", 42566): ["suspects"],
        ("test", 0): ["correct"],
        ("test", 3): ["correct"],
    }
    for example in gallery.examples:
        split = sources.splits[example["split"]]
        (image,) = split.images[split.example_id == example["example_id"]]
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(example["png"]))), 255 - image)


def test_gallery_uses_predictions_of_evaluation(folder: Path) -> None:
    path = folder / "results/evaluate/predictions.parquet"
    pd.read_parquet(path).assign(predicted=[0, 9, 3, 1, 9]).to_parquet(path, index=False)
    examples = examples_of(folder)
    assert examples["test-720"]["predicted"] == 9
    assert examples["train-42566"]["predicted"] == 4
    assert examples["test-720"]["scores"]["confidence"] == pytest.approx(0.6)
    assert "confidence" not in examples["train-42566"]["scores"]


def test_scores_may_be_of_a_sample_of_the_examples(folder: Path) -> None:
    everything = examples_of(folder)
    path = folder / "results/gradients/scores.parquet"
    scores = pd.read_parquet(path)
    scores[scores["example_id"].isin([720, 1226, 42566])].to_parquet(path, index=False)
    examples = examples_of(folder)
    assert list(examples) == list(everything)
    assert examples["test-720"] == everything["test-720"]
    assert examples["test-2654"]["scores"] == {"confidence": pytest.approx(0.9)}
    assert 'id="test-2654"' in render_page(folder)


def test_every_cell_of_the_matrix_counts_its_examples_and_leads_to_one_of_them(folder: Path) -> None:
    sources = read_sources(folder)
    cells = {
        (cell["label"], cell["predicted"]): cell for row in confusion_matrix(sources.predictions, 10) for cell in row
    }
    counts = {pair: cell["number"] for pair, cell in cells.items() if cell["number"]}
    assert counts == {(0, 0): 1, (5, 3): 2, (1, 1): 1, (4, 9): 1}
    assert sum(counts.values()) == len(EXAMPLES["test"])
    first = make_gallery(sources).cells
    assert {pair: (example["label"], example["predicted"]) for pair, example in first.items()} == {
        pair: pair for pair in counts
    }
    assert cells[5, 3]["shade"] == 9
    assert 0 < cells[4, 9]["shade"] < 9
    assert cells[0, 0]["shade"] == cells[2, 3]["shade"] == 0


@pytest.mark.parametrize("limit", [1, 30, 1000])
def test_of_many_mistakes_each_pair_keeps_its_most_confident_ones(limit: int) -> None:
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.integers(0, 3, (200, 2)), columns=["label", "predicted"])
    table["confidence"] = random.permutation(200) / 200
    rows = table.loc[mistakes(table, limit)]
    wrong = table[table["label"] != table["predicted"]]
    assert len(rows) == min(limit, len(wrong))
    assert rows["confidence"].is_monotonic_decreasing
    pairs = rows.groupby(["label", "predicted"])
    if limit == 30:
        assert (pairs.size() == 5).all()
    for (label, predicted), part in pairs:
        same = wrong[(wrong["label"] == label) & (wrong["predicted"] == predicted)]
        assert set(same.nlargest(len(part), "confidence").index) == set(part.index)
