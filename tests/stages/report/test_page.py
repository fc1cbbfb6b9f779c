"""The report is one self-contained file, runs no script but its own, and agrees with the metrics."""

import base64
import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from projects import ROOT
from report_folder import (
    DIGEST,
    METRICS,
    SHOWN,
    STAGES,
    SUMMARY,
    TABLES,
    Reader,
    load_params,
    render,
    set_param,
    write_metrics,
)
from ruamel.yaml import YAML

from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.stages.report.charts import Chart, Series, Stop, linear_ticks
from gradtrail.support.errors import UserError

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\" onload='x' & ![a](https://a.b/c.png) <b>"


def test_same_files_give_the_same_bytes_wherever_they_lie(folder: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder, elsewhere)
    assert render(folder) == render(folder) == render(elsewhere)


def test_page_loads_nothing_and_runs_no_script_but_its_own(folder: Path) -> None:
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
    ],
)
def test_page_names_the_data_set_and_no_other(name: str, called: str, folder: Path) -> None:
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


def test_numbers_equal_metrics_files(folder: Path) -> None:
    words = Reader(render(folder)).words
    for message in (
        "Test accuracy 98.59% 98.34% to 98.80% (95% interval)",
        "Calibration error 0.0978 uncalibrated: 0.1200",
        "Best validation accuracy 98.56% epoch 2; last epoch 98.54%",
        "model mlp-256-128 seed 0 epochs 10 batch size 128 activation relu dropout 0 precision float32 optimizer adamw",
        "schedule warmup_cosine warmup fraction 0.1 end fraction 0 clip norm 1 label smoothing 0.1",
        "The typical gradient noise scale is 382,509 examples, at batch size 128.",
        "9,859 of 10,000 test examples are classified correctly and 141 are not",
        "the model is underconfident. The expected calibration error is 0.0978, and 0.1200 without the temperature",
        "train_step train 128 134 MFLOP 60.1 MiB 1.79 MiB 46.5 MiB 1,358 61",
    ):
        assert message in words, message


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
    for message in (
        "Test accuracy 98.59% ± 0.09% (sd), mean over 3 seeds",
        "Accuracy of the ensemble 98.80% 98.57% to 99.00% (95% interval)",
        "Calibration error 0.0025 of the ensemble; uncalibrated: 0.1100",
        "It classifies 9,880 of 10,000 test examples correctly",
        "each of the 3 seeds 0 to 2; metrics are means over them",
        "Members of the ensemble seed test accuracy test loss calibration error temperature 0 98.00% 0.0500 0.0100 0.6",
        "ensemble 98.80% 0.0410 0.0025 0.5",
        "members 3 vary order, dropout epochs 10",
    ):
        assert message in words, message
    assert page.count('class="band validation"') == 2


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


def test_lineage_has_every_digest_param_and_version(folder: Path) -> None:
    words = Reader(render(folder)).words
    versions = YAML(typ="safe", pure=True).load(folder / "pipeline/versions.yaml")
    for spec in STAGES.values():
        for out in spec.outs:
            assert f"{out} {digest(folder / out)}" in words
    for message in ("train.mlp.hidden [256, 128]", "train.clip_norm 1.0", "train.patience null", "train.remat false"):
        assert message in words, message
    assert f"jax {versions['jax']}" in words


def test_report_runs_again_where_a_param_that_it_shows_changes() -> None:
    params = {key for spec in STAGES.values() for key in spec.params["params.yaml"]}
    assert params <= set(read_pipeline(ROOT / "dvc.yaml")["report"].params["params.yaml"])


def a_chart(points: list[tuple[float, float]], *, log: bool = False, square: bool = False) -> Chart:
    series = [Series(name="a", style="train", points=points)]
    stops = [Stop(x=x, lines=[f"{y:g}"]) for x, y in points]
    return Chart(id="c", title="t", alt="a", x_label="x", series=series, stops=stops, log=log, square=square)


@pytest.mark.parametrize("log", [False, True])
def test_line_goes_through_the_values_as_the_ticks_number_them(log: bool) -> None:
    chart = a_chart([(1, 0.5), (2, 1.0), (4, 0.1)], log=log)
    ((_, path, dots),) = chart.lines
    assert path == " ".join(f"{letter}{x} {y}" for letter, (x, y) in zip("MLL", dots, strict=True))
    assert {tick.text: tick.place for tick in chart.x_ticks}["2"] == dots[1][0]
    ticks = {tick.text: tick.place for tick in chart.y_ticks}
    assert ticks["1"] == dots[1][1]
    assert ("0" in ticks) == (not log)
    left, right, top, bottom = chart.frame
    assert all(left <= float(x) <= right and top <= float(y) <= bottom for x, y in dots)


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6), most=st.integers(3, 10), whole=st.booleans())
def test_ticks_are_few_even_round_and_inside(low: float, span: float, most: int, whole: bool) -> None:
    ticks = linear_ticks(low, low + span, most, whole=whole)
    assert len(ticks) <= most or whole
    slack = 1e-6 * max(1.0, abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)
    assert not whole or all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    "file",
    [
        *(
            "params.yaml",
            "pipeline/versions.yaml",
            "data/raw",
            "data/processed/dataset.json",
            "data/processed/train/images.npy",
        ),
        *("models/final.safetensors", "results/metrics/train.json", "results/gradients/summary.md"),
        *(f"results/{name}.csv" for name in TABLES),
        *(f"results/{name}.png" for name in SHOWN),
        *("results/evaluate/predictions.parquet", "results/gradients/scores.parquet", "data/processed/test/labels.npy"),
    ],
)
def test_missing_file_is_one_line(file: str, folder: Path) -> None:
    path = folder / file
    (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    with pytest.raises(UserError, match=f"{re.escape(file)}: no such file") as error:
        render(folder)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not readable as JSON"), ('{"dataset_digest": "other"}', "of another data set")]
)
def test_damaged_or_foreign_metrics_are_one_line(content: str, message: str, folder: Path) -> None:
    (folder / "results/metrics/train.json").write_text(content)
    with pytest.raises(UserError, match=rf"train\.json[^\n]*{message}[^\n]*$"):
        render(folder)
