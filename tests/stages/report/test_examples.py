"""The gallery has every example once, with its image, scores and groups; a private training has its parts."""

import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from report_folder import EXAMPLES, METRICS, TABLES, load_params, render, write_metrics
from stage_results import a_guarantee

from gradtrail.stages.artifacts.privacy import NOT_COVERED, PrivacyGuarantee, write_guarantee
from gradtrail.stages.report import inputs
from gradtrail.stages.report.inputs import read_sources
from gradtrail.stages.report.sections.examples import Gallery, make_gallery, spread
from gradtrail.stages.report.sections.overview import make_overview
from gradtrail.stages.report.sections.privacy import privacy_sections


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


EPSILONS = (1.25, 2.96)
EPOCHS = [line.split(",") for line in TABLES["train/epochs"].splitlines()]


def private(folder: Path, guarantee: PrivacyGuarantee) -> Path:
    """Make the folder that of a private training; without what one to publish leaves out."""
    blank = ["", "", ""] if guarantee.release else None
    rows = [
        [row[0], *(blank or row[1:4]), *row[4:], str(epsilon)]
        for row, epsilon in zip(EPOCHS[1:], EPSILONS, strict=True)
    ]
    lines = [[*EPOCHS[0], "epsilon"], *rows]
    (folder / "results/train/epochs.csv").write_text("\n".join(map(",".join, lines)))
    write_guarantee(folder / "results/train", guarantee)
    if guarantee.release:
        hide(folder)
    params = load_params(folder)
    params["train"]["privacy"] |= {"enabled": True, "secret_sha256": "0" * 64 if guarantee.has_secret else None}
    params["train"]["privacy"] |= {"release": guarantee.release}
    (folder / "params.yaml").write_text(json.dumps(params))
    return folder


def hide(folder: Path) -> None:
    """Remove what `train` and `gradients` leave out where a training is to be published."""
    write_metrics(folder, "train", {key: value for key, value in METRICS["train"].items() if key != "accuracy"})
    public = ("num_examples", "validation_grad_norm_median", "test_grad_norm_median")
    write_metrics(folder, "gradients", {key: METRICS["gradients"][key] for key in public})
    for name in ("noise_scale", "classes", "influence"):
        path = folder / f"results/gradients/{name}.csv"
        path.write_text(path.read_text().splitlines()[0])
    for name in ("course", "classes", "influence", "suspects_train"):
        (folder / f"results/gradients/{name}.png").unlink()
    suspects = folder / "results/gradients/suspects.csv"
    suspects.write_text("\n".join(line for line in suspects.read_text().splitlines() if not line.startswith("train")))


def test_report_of_public_training_does_not_mention_privacy(folder: Path) -> None:
    assert privacy_sections(inputs.read_sources(folder)) == []
    page = render(folder)
    assert 'href="#privacy"' not in page
    assert "epsilon" not in re.sub(r"<code>[^<]*</code>", "", page), "outside of the params"


def test_report_of_private_training_has_epsilon_curve_and_warnings(folder: Path) -> None:
    page = render(private(folder, a_guarantee(epsilon=2.96, has_secret=False)))
    assert "Private training: epsilon 2.96 at delta 1e-05." in page
    assert '<li><a href="#privacy">Privacy</a></li>' in page
    assert 'aria-label="Epsilon by PLD by epoch: 1.25 to 2.96, at delta 1e-05."' in page
    for message in ("add", "does not cover", "drawn from the seed", "threefry", "digests of the data"):
        assert message in page, message
    assert page.count(NOT_COVERED) == 4, "above the examples, the training, the data and the gradients"
    facts = dict(privacy_sections(inputs.read_sources(folder))[0].tables[0].rows)
    assert facts["noise multiplier"] == "1.5"
    assert facts["chance to be in a batch (Poisson sampling)"] == "10.000%"
    assert facts["steps"] == "30"


def test_training_to_publish_shows_nothing_of_its_examples(folder: Path) -> None:
    images, samples = 'alt="train example', 'alt="The first of'  # of the gallery, of the data
    assert images in render(folder)
    assert samples in render(folder)
    page = render(private(folder, a_guarantee(release=True)))
    assert "nothing on this page was computed from training examples without noise." in page
    assert NOT_COVERED not in page
    left_out = ("training accuracy over the last epoch", "standard deviation of", "nan", ">training<", "noise scale in")
    for message in (images, samples, *left_out):
        assert message not in page, message
    assert "The validation accuracy at the end of the last epoch is 98.54%." in page
