"""The gallery has every example once, with the image, the scores and the groups that it belongs to."""

import io
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_folder import EXAMPLES

from gradtrail.stages.report.inputs import read_sources
from gradtrail.stages.report.sections.examples import Gallery, make_gallery, spread
from gradtrail.stages.report.sections.overview import make_overview


def gallery_of(folder: Path) -> Gallery:
    return make_gallery(read_sources(folder))


def test_each_example_is_there_once_with_its_groups_and_its_own_image(folder: Path) -> None:
    sources = read_sources(folder)
    gallery = make_gallery(sources)
    groups = {example.id: set(example.groups) for example in gallery.examples}
    assert groups == {
        "test-720": {"mistakes", "largest"},
        "test-1226": {"mistakes", "suspects"},
        "test-2654": {"mistakes"},
        "train-42566": {"suspects"},
        "test-0": {"correct"},
        "test-3": {"correct"},
    }
    assert {group.id: group.number for group in gallery.groups} == dict(
        zip(("mistakes", "largest", "suspects", "correct"), (3, 1, 2, 2), strict=True)
    )
    for example in gallery.examples:
        split = sources.splits[example.split]
        (image,) = split.images[split.example_id == example.example_id]
        pixels = np.asarray(Image.open(io.BytesIO(example.png)))
        np.testing.assert_array_equal(pixels, 255 - image)


def test_gallery_uses_predictions_of_evaluation(folder: Path) -> None:
    path = folder / "results/evaluate/predictions.parquet"
    pd.read_parquet(path).assign(predicted=[0, 9, 3, 1, 9]).to_parquet(path, index=False)
    examples = {example.id: example for example in gallery_of(folder).examples}
    assert examples["test-720"].predicted == 9
    assert examples["train-42566"].predicted == 4
    assert examples["test-720"].scores["confidence"] == pytest.approx(0.6)
    assert "confidence" not in examples["train-42566"].scores


def test_every_cell_of_the_matrix_counts_its_examples_and_leads_to_one_of_them(folder: Path) -> None:
    gallery, matrix = gallery_of(folder), make_overview(read_sources(folder)).matrix
    counted = {(cell.label, cell.predicted): cell.number for row in matrix for cell in row if cell.number}
    assert counted == {(0, 0): 1, (5, 3): 2, (1, 1): 1, (4, 9): 1}
    assert sum(counted.values()) == len(EXAMPLES["test"])
    assert {place: (example.label, example.predicted) for place, example in gallery.cells.items()} == {
        place: place for place in counted
    }
    levels = {(cell.label, cell.predicted): cell.level for row in matrix for cell in row}
    assert levels[5, 3] == 9
    assert 0 < levels[4, 9] < 9
    assert levels[0, 0] == levels[2, 3] == 0


@pytest.mark.parametrize("limit", [0, 1, 6, 30, 1000])
def test_of_many_mistakes_each_pair_keeps_its_most_confident_ones(limit: int) -> None:
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.integers(0, 3, (200, 2)), columns=["label", "predicted"])
    table["confidence"] = random.permutation(200) / 200
    rows = table.loc[spread(table, limit)]
    wrong = table[table["label"] != table["predicted"]]
    assert len(rows) == min(limit, len(wrong))
    assert (rows["label"] != rows["predicted"]).all()
    assert all(left >= right for left, right in itertools.pairwise(rows["confidence"]))
    sizes = rows.groupby(["label", "predicted"]).size()
    if limit == 30:
        assert (sizes == 5).all()
    for pair, part in rows.groupby(["label", "predicted"]):
        best = wrong[(wrong["label"] == pair[0]) & (wrong["predicted"] == pair[1])].nlargest(len(part), "confidence")
        assert set(best.index) == set(part.index)
