"""The report is one file that holds everything it shows, runs no script but its own, and says what the metrics say."""

import base64
import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from projects import ROOT
from report_folder import (
    DIGEST,
    METRICS,
    SHOWN,
    STAGES,
    SUMMARY,
    Reader,
    a_png,
    load_params,
    render,
    set_param,
    write_metrics,
)
from ruamel.yaml import YAML

from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.stages.report import inputs
from gradtrail.stages.report import page as report
from gradtrail.stages.report.sections.overview import params_in_force
from gradtrail.support.errors import UserError

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\" onload='x' & ![a](https://a.b/c.png) <b>"


def test_the_same_files_give_the_same_bytes_wherever_they_lie(folder: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder, elsewhere)
    assert render(folder) == render(folder) == render(elsewhere)


def test_a_figure_or_table_that_changes_changes_the_page(folder: Path) -> None:
    before = render(folder)
    (folder / "results/train/steps.png").write_bytes(a_png(99))
    assert (after := render(folder)) != before
    (folder / "results/train/steps.parquet").write_text("others")
    assert render(folder) != after


def test_the_page_loads_nothing_and_runs_no_script_but_its_own(folder: Path) -> None:
    page = render(folder)
    reader = Reader(page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest_of_script = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert reader.all("script") == [{}]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert not {"iframe", "object", "embed", "form", "base"} & {tag for tag, _ in reader.tags}
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in reader.all("img"))
    assert all(str(link["href"]).startswith(("#", "data:")) for tag in ("a", "link") for link in reader.all(tag))
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    policy = next(meta["content"] for meta in reader.all("meta") if "http-equiv" in meta)
    allowed = {"img-src": "data:", "style-src": "'unsafe-inline'", "script-src": f"'sha256-{digest_of_script}'"}
    assert policy == "; ".join(["default-src 'none'", *(f"{kind} {source}" for kind, source in allowed.items())])


def test_every_figure_is_there_with_a_text_alternative_that_has_a_number(folder: Path) -> None:
    images = [image for image in Reader(render(folder)).all("img") if "width" in image]
    alts = [str(image["alt"]) for image in images]
    assert len({image["src"] for image in images}) == len(SHOWN)
    assert len(set(alts)) == len(SHOWN)
    assert all(len(alt) > 40 and re.search(r"\d", alt) for alt in alts)
    assert all((image["width"], image["height"]) == ("100", "50") for image in images)


def test_no_markup_of_another_language_is_on_the_page(folder: Path) -> None:
    assert "`" not in Reader(render(folder)).words


def test_text_from_files_is_text_on_the_page(folder: Path) -> None:
    harmless = Reader(render(folder, title="A title"))
    summary = folder / "results/gradients/summary.md"
    summary.write_text(
        f"{SUMMARY}\n{HOSTILE}\n\n{HOSTILE}\n\n[a](javascript:alert(1)) <https://a.b> [x]\n\n[x]: https://a.b\n"
    )
    params = load_params(folder)
    params["train"]["optimizer"] = params["train"]["schedule"] = HOSTILE
    params["evaluate"][HOSTILE] = HOSTILE
    (folder / "params.yaml").write_text(json.dumps(params))
    (folder / "pipeline/versions.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    table = folder / "results/train/parameters.csv"
    table.write_text('parameter,shape,number\n"' + HOSTILE.replace('"', '""') + '",1,1\n')
    hostile = Reader(render(folder, title=HOSTILE))
    assert {tag for tag, _ in hostile.tags} <= {tag for tag, _ in harmless.tags}
    assert len(hostile.all("img")) == len(harmless.all("img"))
    assert len(hostile.all("script")) == 1
    assert all(str(link["href"]).startswith("#") for link in hostile.all("a"))
    assert not any(name.startswith("on") for _, attributes in hostile.tags for name in attributes)
    assert hostile.words.count("<script>alert(1)</script>") >= 8


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("mnist", "MNIST"),
        ("fashion_mnist", "Fashion-MNIST"),
        ("digits", "scikit-learn's digits"),
        ("idx", "IDX files"),
        ("clothes", "clothes"),
    ],
)
def test_the_page_names_the_data_set_and_no_other(name: str, called: str, folder: Path) -> None:
    path = folder / "data/processed/dataset.json"
    path.write_text(path.read_text().replace("mnist", name))
    params = load_params(folder)
    params["fetch"]["dataset"] = name
    (folder / "params.yaml").write_text(json.dumps(params))
    words = Reader(render(folder)).words
    assert f"A title: mlp-256-128 on {called} Data set {name}, digest {DIGEST}" in words
    assert f"The data set {name} {DIGEST[:8]} has 60,000 training images" in words
    assert ("not comparable with results on other data sets" in words) == (name == "digits")
    assert ("mnist" in words.lower()) == ("mnist" in name)


def test_the_numbers_are_those_of_the_metrics_files(folder: Path) -> None:
    words = Reader(render(folder)).words
    for said in (
        "Test accuracy 98.59% 98.34% to 98.80% (95% interval)",
        "Mistakes 141 of 10,000 test examples",
        "Test loss 0.1414",
        "Calibration error 0.0978 uncalibrated: 0.1200",
        "Best validation accuracy 98.56% epoch 2; last epoch 98.54%",
        "Parameters 235,146 mlp-256-128",
        "model mlp-256-128 seed 0 epochs 10 batch size 128 activation relu dropout 0 precision float32 optimizer adamw",
        "schedule warmup_cosine warmup fraction 0.1 end fraction 0 clip norm 1 label smoothing 0.1",
        "The typical gradient noise scale is 382,509 examples, at batch size 128.",
        "9,859 of 10,000 test examples are classified correctly and 141 are not",
        "The most frequent mistake is label 5 predicted as 3 (2 times)",
        "the model is underconfident. The expected calibration error is 0.0978, and 0.1200 without the temperature",
        "train_step 134 MFLOP 18.9 MiB 1.79 MiB 46.5 MiB 1,358 86",
        "382,509 29,519 unbounded",
        "train_step train 128 134 MFLOP 60.1 MiB 1.79 MiB 46.5 MiB 1,358 61",
    ):
        assert said in words, said


def test_sentences_follow_the_metrics(folder: Path) -> None:
    set_param(folder, "preprocess", "label_noise", 0.1)
    write_metrics(folder, "train", METRICS["train"] | {"steps": 430, "epochs": 1, "accuracy": 0.9})
    write_metrics(folder, "evaluate", METRICS["evaluate"] | {"accuracy": 0.8})
    words = Reader(render(folder)).words
    assert "Label noise changed 5,500 of the training labels (10.0%)" in words
    assert "for one epoch (430 of 1,290 planned steps)" in words
    assert "8.5 percentage points below the validation accuracy" in words
    assert "the model is overconfident" in words


def test_corrections_are_told_with_what_noise_is_left_and_the_second_accuracy(folder: Path) -> None:
    for key, value in (("label_noise", 0.1), ("corrections", True)):
        set_param(folder, "preprocess", key, value)
    of_splits = {
        f"{split}_corrected_labels": number for split, number in (("train", 5500), ("validation", 2), ("test", 3))
    }
    write_metrics(folder, "preprocess", METRICS["preprocess"] | of_splits)
    corrected = {"": 0.9862, "_low": 0.9837, "_high": 0.9883}
    found = {f"accuracy_corrected_labels{end}": value for end, value in corrected.items()}
    write_metrics(folder, "evaluate", METRICS["evaluate"] | found)
    words = Reader(render(folder)).words
    assert (
        "Label noise changed 5,500 of the training labels (10.0%). Corrections were applied to 5,500 train, 2 "
        "validation, 3 test labels; 0 that noise changed are still wrong."
    ) in words
    assert "Accuracy, corrected labels 98.62% 98.37% to 98.83%" in words
    assert "With the 3 corrected test labels in place of the given ones the accuracy is 98.62% (95% interval:" in words


def test_the_params_in_force_are_shown_and_what_is_off_is_not(folder: Path) -> None:
    shown = params_in_force(inputs.read_sources(folder))
    assert shown["model"] == "mlp-256-128"
    assert shown["weight decay"] == "0.1"
    assert shown["warmup fraction"] == "0.1"
    assert not {"momentum", "hidden", "patience", "shift", "label noise", "augmentation: shift"} & shown.keys()
    for key, value in (("optimizer", "schedule_free"), ("precision", "float16"), ("augmentation", {"shift": 2.0})):
        set_param(folder, "train", key, value)
    set_param(folder, "preprocess", "label_noise", 0.1)
    shown = params_in_force(inputs.read_sources(folder))
    assert {name: shown[name] for name in ("augmentation: shift", "loss scaling: initial", "label noise")} == {
        "augmentation: shift": "2",
        "loss scaling: initial": "32768",
        "label noise": "0.1",
    }
    assert shown["warmup fraction"] == "0.05", "of the optimizer"
    assert shown["warmup cosine: warmup fraction"] == "0.1"


def with_members(folder: Path) -> None:
    """Make the folder that of a training with three members."""
    evaluated = METRICS["evaluate"] | {"members": 3, "accuracy_sd": 0.0009, "loss_sd": 0.002, "num_mistakes": 141.3}
    evaluated |= {"ensemble_accuracy": 0.988, "ensemble_accuracy_low": 0.9857, "ensemble_accuracy_high": 0.99}
    evaluated |= {"ensemble_loss": 0.041, "ensemble_temperature": 0.5, "ensemble_expected_calibration_error": 0.0025}
    write_metrics(folder, "evaluate", evaluated | {"ensemble_expected_calibration_error_uncalibrated": 0.11})
    trained = METRICS["train"] | {"members": 3, "best_epoch": 2.67, "validation_accuracy_sd": 0.0011}
    write_metrics(folder, "train", trained)
    members = "seed,accuracy,loss,expected_calibration_error,temperature"
    rows = "".join(f"\n{seed},0.98{seed},0.05,0.01,0.6" for seed in range(3))
    (folder / "results/evaluate/members.csv").write_text(members + rows)
    ends = "validation_loss_low,validation_loss_high,validation_accuracy_low,validation_accuracy_high"
    (folder / "results/train/epochs.csv").write_text(
        f"epoch,loss,cross_entropy,accuracy,validation_loss,validation_accuracy,{ends}\n"
        "1,0.8,0.4,0.9,0.3,0.96,0.25,0.35,0.95,0.97\n3,0.5,0.1,0.99,0.2,0.98,,,,"
    )
    set_param(folder, "train", "members", 3)
    set_param(folder, "train", "vary", ["order", "dropout"])


def test_of_several_members_there_are_means_and_the_ensemble(folder: Path) -> None:
    with_members(folder)
    page = render(folder)
    words = Reader(page).words
    for said in (
        "Test accuracy 98.59% ± 0.09% (sd), mean over 3 seeds",
        "Accuracy of the ensemble 98.80% 98.57% to 99.00% (95% interval)",
        "Test loss of the ensemble 0.0410 nats; of one network 0.1414 ± 0.0020 (sd)",
        "Calibration error 0.0025 of the ensemble; uncalibrated: 0.1100",
        "Validation accuracy 98.54% ± 0.11% (sd); best epochs 98.56%",
        "Parameters 235,146 mlp-256-128, each of 3",
        "It classifies 9,880 of 10,000 test examples correctly",
        "Probabilities are calibrated by a temperature of 0.5,",
        "The expected calibration error is 0.0025, and 0.1100 without",
        "each of the 3 seeds 0 to 2; metrics are means over them",
        "was reached on average in epoch 2.7.",
        "Members of the ensemble seed test accuracy test loss calibration error temperature 0 98.00% 0.0500 0.0100 0.6",
        "ensemble 98.80% 0.0410 0.0025 0.5",
        "members 3 vary order, dropout epochs 10",
    ):
        assert said in words, said
    assert page.count('class="band validation"') == 2


def test_of_a_single_member_nothing_is_said_of_members(folder: Path) -> None:
    page = render(folder)
    assert "ensemble" not in Reader(page).words
    assert 'class="band' not in page


def test_with_label_noise_the_scores_that_find_it_are_shown(folder: Path) -> None:
    stem = folder / "results/gradients/label_error_scores"
    stem.with_suffix(".csv").write_text("score,epoch,auroc,average_precision\nel2n,2,0.99,0.951\n")
    stem.with_suffix(".png").write_bytes(a_png(50))
    alts = [image["alt"] for image in Reader(render(folder)).all("img")]
    assert any("The best is el2n, with an average precision of 0.951." in str(alt) for alt in alts)


def test_where_no_mistake_was_made_the_page_says_so(folder: Path) -> None:
    (folder / "results/evaluate/classes.csv").write_text("label,predicted\n0,0\n1,1\n")
    (folder / "results/evaluate/mistakes.csv").write_text("example_id,label,predicted,probability,loss\n")
    assert "No example of any class is misclassified." in Reader(render(folder)).words


def test_headings_are_in_order_ids_are_unique_and_contents_lead_somewhere(folder: Path) -> None:
    reader = Reader(render(folder))
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert max(levels) == 3
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    targets = {str(link["href"])[1:] for link in reader.all("a")}
    sections = {"overview", "examples", "evaluation", "training", "data", "gradients", "costs", "lineage"}
    assert {section["id"] for section in reader.all("section")} == sections
    assert sections <= targets <= set(ids)
    assert {attributes["aria-labelledby"] for attributes in reader.all("section")} <= set(ids)
    assert all(cell["scope"] in ("row", "col") for cell in reader.all("th"))


def test_the_lineage_has_every_digest_param_and_version(folder: Path) -> None:
    words = Reader(render(folder)).words
    versions = YAML(typ="safe", pure=True).load(folder / "pipeline/versions.yaml")
    for spec in STAGES.values():
        for out in spec.outs:
            assert f"{out} {digest(folder / out)}" in words
    for said in ("train.mlp.hidden [256, 128]", "train.clip_norm 1.0", "train.patience null", "train.remat false"):
        assert said in words, said
    assert f"jax {versions['jax']}" in words


def test_a_stage_that_the_report_reads_is_part_of_its_lineage(folder: Path) -> None:
    pipeline = YAML(typ="safe", pure=True).load(folder / "dvc.yaml")
    outs = {"outs": ["results/toy"], "metrics": [{"results/metrics/toy.json": {"cache": False}}]}
    toy = {"cmd": "toy", "deps": ["models/final.safetensors"], "params": ["toy.size", "train.seed"], **outs}
    pipeline["stages"] = {"toy": toy} | pipeline["stages"]
    (folder / "dvc.yaml").write_text(json.dumps(pipeline))
    (folder / "params.yaml").write_text(json.dumps(load_params(folder) | {"toy": {"size": 7, "unread": 8}}))
    write_metrics(folder, "toy", {})
    assert "toy" not in Reader(render(folder)).words, "the report does not read it yet"

    pipeline["stages"]["report"]["deps"] += ["results/toy", "results/metrics/toy.json"]
    (folder / "dvc.yaml").write_text(json.dumps(pipeline))
    with pytest.raises(UserError, match="results/toy: no such file"):
        render(folder)
    (folder / "results/toy").mkdir()
    (folder / "results/toy/table.csv").write_text("a\n1\n")
    write_metrics(folder, "toy", {"accuracy": 1})
    words = Reader(render(folder)).words
    assert (
        f"Read by toy file or folder digest models/final.safetensors {digest(folder / 'models/final.safetensors')}"
        in words
    )
    assert f"Written by toy file or folder digest results/toy {digest(folder / 'results/toy')}" in words
    assert "Params of toy key value toy.size 7 train.seed 0" in words
    write_metrics(folder, "toy", {"dataset_digest": "other"})
    with pytest.raises(UserError, match=r"results/metrics/toy\.json: of another data set"):
        render(folder)


def test_the_report_runs_again_where_a_param_that_it_shows_changes() -> None:
    shown = {key for spec in STAGES.values() for key in spec.params["params.yaml"]}
    assert shown <= set(read_pipeline(ROOT / "dvc.yaml")["report"].params["params.yaml"])


@pytest.mark.parametrize("title", ["", "  ", "x" * 201])
def test_a_title_is_neither_empty_nor_long(title: str) -> None:
    with pytest.raises(ValueError, match="title must have 1 to 200 characters"):
        report.ReportConfig(title=title)


def test_metrics_have_the_size_of_the_page(folder: Path) -> None:
    sources = inputs.read_sources(folder)
    content = report.content_of(sources)
    page = report.render(report.ReportConfig(title="A “title”"), sources, content)
    metrics = report.measure(sources, content, page)
    assert metrics["num_figures"] == len(SHOWN)
    assert metrics["num_images"] == 6
    (folder / "page.html").write_text(page, encoding="utf-8")
    assert metrics["size_bytes"] == (folder / "page.html").stat().st_size
    assert DIGEST.startswith(metrics["dataset_digest"])
