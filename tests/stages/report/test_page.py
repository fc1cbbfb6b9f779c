"""The report is one self-contained file, runs no script but its own, and agrees with the metrics."""

import base64
import hashlib
import itertools
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from projects import ROOT
from report_folder import (
    DIGEST,
    METRICS,
    STAGES,
    SUMMARY,
    make_members,
    make_private,
    render_page,
    set_params,
    write_metrics,
)
from stage_results import a_guarantee

from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.stages.data.changes import write_changes
from gradtrail.stages.dp.guarantee import NOT_COVERED
from gradtrail.stages.report.gallery import make_gallery
from gradtrail.stages.report.numbers import confusion_matrix, read_sources
from gradtrail.support.errors import UserError

VOID = {"meta", "link", "img", "br", "hr", "input", "col", "wbr"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\" onload='x' & ![a](https://a.b/c.png) <b>"


class Reader(HTMLParser):
    """Reads a page strictly: each tag is closed, by its own name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words = ""  # what a person reads
        self.feed(text)
        self.words = " ".join(self.words.split())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += f" {data}" if {*self.open}.isdisjoint({"style", "script"}) else ""

    def all(self, tag: str) -> list[dict[str, Any]]:
        """Return the attributes of each tag of that name."""
        return [attributes for name, attributes in self.tags if name == tag]


def test_same_files_give_the_same_bytes_in_any_folder(folder: Path, page: str) -> None:
    assert render_page(folder) == render_page(folder) == page


def test_page_loads_nothing_but_the_evaluated_model_and_runs_no_script_but_its_own(page: str) -> None:
    reader = Reader(page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest_of_script = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert reader.all("script") == [{}]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert not {"iframe", "object", "embed", "form", "base"} & {tag for tag, _ in reader.tags}
    assert all(image["src"].startswith("data:image/png;base64,") for image in reader.all("img"))
    assert [link["href"] for link in reader.all("link")] == ["data:,", "evaluate/model.css", "comparisons/what_if.css"]
    assert all(re.match("#|comparisons/what_if.html$", link["href"]) for link in reader.all("a"))
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    policy = next(meta["content"] for meta in reader.all("meta") if "http-equiv" in meta)
    allowed = f"img-src data:; style-src 'unsafe-inline' file:; script-src 'sha256-{digest_of_script}'"
    assert policy == f"default-src 'none'; {allowed}"


def test_text_from_files_is_text_on_the_page(folder: Path, page: str) -> None:
    harmless = Reader(page)
    (folder / "results/gradients/summary.md").write_text(
        f"{SUMMARY}\n{HOSTILE}\n\n[a](javascript:alert(1)) <https://a.b>\n"
    )
    set_params(folder, "train", optimizer=HOSTILE, schedule=HOSTILE)
    table = folder / "results/train/parameters.csv"
    table.write_text('parameter,shape,number\n"' + HOSTILE.replace('"', '""') + '",1,1\n')
    hostile = Reader(render_page(folder, title=HOSTILE))
    assert {tag for tag, _ in hostile.tags} <= {tag for tag, _ in harmless.tags}
    assert len(hostile.all("img")) == len(harmless.all("img"))
    assert hostile.all("a") == harmless.all("a")
    assert not any(name.startswith("on") for _, attributes in hostile.tags for name in attributes)
    assert hostile.words.count("<script>alert(1)</script>") >= 6


@pytest.mark.parametrize(("name", "title"), [("mnist", "MNIST"), ("digits", "scikit-learn's digits")])
def test_page_names_the_data_set_and_no_other(name: str, title: str, folder: Path) -> None:
    path = folder / "data/processed/dataset.json"
    path.write_text(path.read_text().replace("mnist", name))
    set_params(folder, "fetch", dataset=name)
    words = Reader(render_page(folder)).words
    assert f"A title: mlp-256-128 on {title}" in words
    assert f"The data set {name} {DIGEST[:8]} has 60,000 training images" in words
    assert ("not comparable with results on other data sets" in words) == (name == "digits")
    assert ("mnist" in words.lower()) == (name == "mnist")


def test_numbers_equal_metrics_files(page: str) -> None:
    words = Reader(page).words
    for message in (
        "Test accuracy 98.59% 98.34% to 98.80%",
        "Calibration error 0.0978 uncalibrated: 0.1200",
        "Best validation accuracy 98.56% epoch 2; last epoch 98.54%",
        "model mlp-256-128 epochs 10 batch size 128 seed 0 activation relu optimizer adamw",
        "schedule warmup_cosine warmup fraction 0.1 end fraction 0.0",
        "loss cross_entropy label smoothing 0.1 clip norm 1.0",
        "382,509 29,519 unbounded",
        "9,859 of 10,000",
        "label 5 predicted as 3 (2 times)",
        "underconfident",
        "train_step 134 MFLOP",
        "From batch size 128 to 256, the FLOPs of a training step grow by a factor of 1.92",
    ):
        assert message in words, message


def test_class_without_training_examples_has_no_share(folder: Path) -> None:
    (folder / "results/gradients/classes.csv").write_text("class,share\n0,0.85\n1,\n2,-0.21\n")
    assert "by a gradient step: class 0 has 85%, class 2 has -21%." in render_page(folder)


def test_changes_of_the_training_split_are_told(folder: Path) -> None:
    sources = read_sources(folder)
    write_changes(folder / "results/train", sources.splits["train"], np.array([-1, 5], np.int32))
    write_metrics(folder, "train", METRICS["train"] | {"removed_examples": 1, "relabeled_examples": 1})
    changed = read_sources(folder)
    assert (changed.splits["train"].example_id.tolist(), changed.splits["train"].labels.tolist()) == ([42566], [5])
    (suspect,) = [row for row in make_gallery(changed).examples if row["split"] == "train"]
    assert (suspect["label"], suspect["true_label"]) == (5, 5)
    words = Reader(render_page(folder)).words
    assert "By train.changes, 1 of the 55,000 training examples were removed, and 1 have another label." in words


def test_corrections_and_label_noise_are_told_apart(folder: Path) -> None:
    corrected = {f"accuracy_corrected_labels{end}": 0.99 for end in ("", "_low", "_high")}
    write_metrics(folder, "evaluate", METRICS["evaluate"] | corrected)
    numbers = {f"{split}_corrected_labels": 7 for split in ("train", "validation", "test")} | {"noisy_labels": 5400}
    write_metrics(folder, "preprocess", METRICS["preprocess"] | numbers)
    set_params(folder, "preprocess", label_noise=0.1, corrections=True)
    words = Reader(render_page(folder)).words
    for message in (
        "Accuracy, corrected labels 99.00%",
        "7 corrected test labels in place of the given ones the accuracy is 99.00%",
        "5,500 of the training labels (10.0%). Corrections were applied to 7 train, 7 validation, 7 test labels; 5,400",
    ):
        assert message in words, message


def test_of_several_members_there_are_means_and_the_ensemble(folder: Path) -> None:
    make_members(folder)
    page = render_page(folder)
    words = Reader(page).words
    for message in (
        "Test accuracy 98.59% ± 0.09% (sd), mean over 3 seeds",
        "Accuracy of the ensemble 98.80% 98.57% to 99.00%",
        "Calibration error 0.0025 of the ensemble; uncalibrated: 0.1100",
        "9,880 of 10,000",
        "3 seeds 0 to 2",
        "Members of the ensemble seed test accuracy test loss calibration error temperature 0 98.00% 0.0500 0.0100 0.6",
        "ensemble 98.80% 0.0410 0.0025 0.5",
        "members 3 vary [order, dropout]",
    ):
        assert message in words, message


def test_unequal_classes_have_a_balanced_accuracy_and_cells_in_the_colour_of_shares(folder: Path) -> None:
    balanced = {"balanced_accuracy": 0.5, "balanced_accuracy_low": 0.4, "balanced_accuracy_high": 0.6, "f1_macro": 0.45}
    before = render_page(folder)
    write_metrics(folder, "evaluate", METRICS["evaluate"] | balanced)
    page = render_page(folder)
    words = Reader(page).words
    for message in (
        "Balanced accuracy 50.00% mean recall of the classes; 40.00% to 60.00%",
        "the balanced accuracy, the mean of their recalls, is 50.00% (95% interval: 40.00% to 60.00%), and the mean "
        "of their F1 scores 0.450.",
        "fitted on 5,000 validation images",
    ):
        assert message in words, message
    tiles = [text.count('<dd class="note">') for text in (before, page)]
    assert tiles == [6, 6], "they fill the row"
    make_members(folder)
    write_metrics(folder, "evaluate", read_sources(folder).metrics["evaluate"] | balanced)
    assert render_page(folder).count('<dd class="note">') == 6

    predictions = pd.DataFrame({"label": [0] * 100 + [1] * 4, "predicted": [0] * 91 + [1] * 9 + [0] + [1] * 3})
    shades = [
        [[cell["shade"] for cell in row] for row in confusion_matrix(predictions, 2, by_share=by_share)]
        for by_share in (False, True)
    ]
    assert shades == [[[0, 9], [3, 0]], [[0, 6], [9, 0]]], "one of four is more than nine of a hundred"


def test_private_training_has_its_epsilon_and_marks_what_it_does_not_cover(folder: Path, page: str) -> None:
    assert "epsilon" not in re.sub(r"<code>[^<]*</code>", "", page), "outside of the params"
    make_private(folder, a_guarantee(epsilon=2.96, has_secret=False))
    page = render_page(folder)
    words = Reader(page).words
    assert '<li><a href="#privacy">Privacy</a></li>' in page
    assert 'alt="Loss in nats per example, error in percent and epsilon by epoch."' in page
    assert page.count(NOT_COVERED) == 4, "above the examples, the training, the data and the gradients"
    for message in (
        "Private training: epsilon 2.96 at delta 1e-05.",
        "drawn from the seed",
        "noise multiplier 1.5",
        "chance to be in a batch (Poisson sampling) 10.000%",
        "steps 30",
    ):
        assert message in words, message


def test_training_to_publish_shows_nothing_of_its_examples(folder: Path, page: str) -> None:
    images, samples = 'alt="train example', 'alt="The first training images'  # of the gallery, of the data
    assert images in page
    assert samples in page
    make_private(folder, a_guarantee(release=True))
    page = render_page(folder)
    assert "nothing on this page was computed from training examples without noise." in page
    assert "The validation accuracy at the end of the last epoch is 98.54%." in page
    left_out = ("training accuracy over the last epoch", "standard deviation of", "nan", ">training<", "noise scale in")
    for message in (NOT_COVERED, images, samples, *left_out):
        assert message not in page, message


def test_headings_are_in_order_ids_are_unique_and_contents_lead_somewhere(page: str) -> None:
    reader = Reader(page)
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert (levels[0], levels.count(1), max(levels)) == (1, 1, 3)
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    targets = {link["href"][1:] for link in reader.all("a") if link["href"].startswith("#")}
    sections = {"overview", "examples", "evaluation", "training", "data", "gradients", "costs", "lineage"}
    assert {section["id"] for section in reader.all("section")} == sections
    assert sections <= targets <= set(ids)
    assert {attributes["aria-labelledby"] for attributes in reader.all("section")} <= set(ids)
    assert all(cell["scope"] in ("row", "col") for cell in reader.all("th"))


def test_report_runs_again_if_a_param_that_it_shows_changes() -> None:
    params = {key for spec in STAGES.values() for key in spec.params["params.yaml"]}
    assert params <= set(read_pipeline(ROOT / "dvc.yaml")["report"].params["params.yaml"])


@pytest.mark.parametrize(
    "file",
    [
        *("params.yaml", "data/raw", "data/processed/train/images.npy", "results/metrics/train.json"),
        *("results/gradients/largest.csv", "results/gradients/classes.png", "results/gradients/summary.md"),
    ],
)
def test_missing_file_is_one_line(file: str, folder: Path) -> None:
    path = folder / file
    (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    with pytest.raises(UserError, match=rf"{re.escape(file)}: no such file[^\n]*$"):
        render_page(folder)


def test_metrics_of_another_data_set_are_one_line(folder: Path) -> None:
    (folder / "results/metrics/train.json").write_text('{"dataset_digest": "other"}')
    with pytest.raises(UserError, match=r"train\.json: of another data set[^\n]*$"):
        render_page(folder)
