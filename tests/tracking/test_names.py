"""The name of a run, its metrics, its description, and the shared view of the UI."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factories import ROOT

from gradtrail.stages.common.params import flatten
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.tracking import ui_view
from gradtrail.tracking.names import best_values, is_headline, name_of, note, rounded, run_metrics, summary_in
from gradtrail.tracking.render import curves
from gradtrail.tracking.ui_view import share_view, view_state

RUN = "0123456789abcdef" * 2
TAGS = {"stage": "train", "dataset": "digits", "dataset_digest": "ab" * 32, "mlflow.source.git.commit": "c" * 40}
PARAMS = {"train.precision": "bfloat16", "train.batch_size": "128"}
METRICS = {
    "eval/accuracy": 0.9859,
    "eval/accuracy_low": 0.9834,
    "eval/accuracy_high": 0.988,
    "train/epochs": 10.0,
    "train/num_parameters": 235146.0,
    "gradients/noise_scale_typical": 277.3,
}
SUMMARY = """# What the gradients say: mlp-8 on digits

## Largest gradients

The largest is 18.

## Noise

It is 277.
"""


def test_a_private_training_says_what_is_not_covered() -> None:
    spent = METRICS | {"train/epsilon": 2.98, "train/delta": 1e-5}
    text = note(RUN, TAGS, PARAMS, spent, "")
    assert "**Private: epsilon 2.98 at delta 1e-05** for each training example. Training loss and accuracy" in text
    published = note(RUN, TAGS, PARAMS | {"train.privacy.release": "true"}, spent, "")
    assert "nothing here comes from training examples without noise." in published
    assert "epsilon" not in note(RUN, TAGS | {"stage": "evaluate"}, PARAMS, spent, "")


def test_balanced_accuracy_is_beside_the_accuracy_where_the_evaluation_has_it() -> None:
    names = ["eval/balanced_accuracy", "eval/balanced_accuracy_low", "eval/balanced_accuracy_high"]
    text = note(RUN, TAGS, PARAMS, METRICS | dict(zip(names, (0.5, 0.4, 0.6), strict=True)), "")
    assert "Balanced accuracy, the mean over the classes: **50.00%**, 95 % interval 40.00% to 60.00%." in text
    assert "Balanced" not in note(RUN, TAGS, PARAMS, METRICS, "")
    assert all(is_headline(name, "evaluate") for name in [*names, "eval/ensemble_balanced_accuracy"])
    assert not is_headline("eval/f1_macro_low", "evaluate")


@pytest.mark.parametrize("stage", ["train", "gradients"])
def test_summary_of_gradients_passes_from_note_to_note_unchanged(stage: str) -> None:
    text = note(RUN, TAGS | {"stage": stage}, PARAMS, {}, SUMMARY)
    summary = summary_in(text)
    assert summary.startswith("### What the gradients say")
    assert summary.endswith("It is 277.")
    again = note("f" * 32, TAGS, PARAMS, METRICS, summary)
    assert summary_in(again) == summary


SECTIONS = ("fetch", "preprocess", "train", "environment")
COMMITTED = flatten(read_yaml(ROOT / "params.yaml"))
TRAINING = {key: value for key, value in COMMITTED.items() if key.split(".")[0] in SECTIONS}


@pytest.mark.parametrize(
    ("stage", "changes", "name"),
    [
        ("train", {}, "mlp adamw mnist · seed 0"),
        ("evaluate", {"train.seed": 1}, "evaluate mlp adamw mnist · seed 1"),
        ("train", {"train.model": "cnn", "train.optimizer": "sgd"}, "cnn sgd mnist · seed 0"),
        (
            "train",
            {"train.mlp.hidden": [64], "train.epochs": 1},
            "epochs=1 · mlp.hidden=[64] · mlp adamw mnist · seed 0",
        ),
        ("train", {"train.precision": "bfloat16"}, "bfloat16 · mlp adamw mnist · seed 0"),
        ("evaluate", {"train.epochs": 1}, "evaluate · epochs=1 · mlp adamw mnist · seed 0"),
        ("train", {"preprocess.label_noise": 0.1}, "label_noise=0.1 · mlp adamw mnist · seed 0"),
        ("train", {"preprocess.seed": 7}, "preprocess.seed=7 · mlp adamw mnist · seed 0"),
        ("train", {"train.cnn.dropout": 0.5}, "mlp adamw mnist · seed 0"),
        ("train", {"environment.xla_flags": ["x" * 300]}, f"xla_flags=['{'x' * 238}"),
    ],
)
def test_a_name_says_what_differs_from_the_committed_params(stage: str, changes: dict[str, Any], name: str) -> None:
    assert name_of(stage, TRAINING | changes, COMMITTED) == name


def test_fetch_is_named_after_the_data_set_and_a_run_without_a_commit_after_no_differences() -> None:
    assert name_of("fetch", {"fetch.dataset": "digits"}, COMMITTED) == "fetch digits"
    assert name_of("train", TRAINING | {"train.epochs": 1}, {}) == "mlp adamw mnist · seed 0"


def test_evaluation_has_its_error_in_percent_in_place_of_its_mistakes() -> None:
    metrics = {"accuracy": 0.986, "num_mistakes": 140, "loss": 0.0454975427, "dataset": "mnist"}
    assert run_metrics("evaluate", metrics) == {
        "eval/accuracy": 0.986,
        "eval/error_percent": 1.4,
        "eval/loss": 0.0455,
    }
    means = run_metrics("evaluate", metrics | {"members": 3, "num_mistakes_sd": 0.1, "accuracy_sd": 0.001})
    assert means.keys() == {"eval/accuracy", "eval/accuracy_sd", "eval/error_percent", "eval/loss"}


def test_best_values_are_those_of_the_curves_in_validation() -> None:
    rng = np.random.default_rng(0)
    for epochs in (1, 2, 30):
        columns = {name: rng.random(epochs) for name in ("loss", "validation_loss", "validation_accuracy")}
        columns["validation_loss"][:-1][rng.random(epochs - 1) < 0.3] = np.nan
        table = pd.DataFrame({"epoch": range(1, epochs + 1), **columns, "validation_loss_low": 0.0})
        steps = pd.DataFrame({"step": [0], "loss": [-1.0]})
        best = best_values(curves(table, steps, planned_steps=1))
        assert best == pytest.approx(
            {
                "train/best_validation_accuracy": columns["validation_accuracy"].max(),
                "train/best_validation_loss": np.nanmin(columns["validation_loss"]),
            },
            rel=1e-3,
        )
    redacted = {"train/validation_loss": {}, "train/validation_accuracy": {1: math.nan}}
    assert best_values(redacted) == {}


def test_training_shows_one_ratio_of_precisions_and_every_metric_of_an_own_stage() -> None:
    names = [f"profile/{one}_over_float32{end}" for one in ("bfloat16", "float16") for end in ("", "_low", "_high")]
    assert [name for name in names if is_headline(name, "profile")] == names[:3]
    own = ["toy/score", "toy/score/by_class", "toy/compile_total_seconds", "eval/loss"]
    assert [name for name in own if is_headline(name, "toy")] == ["toy/score"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.00349872, 0.003499), (1.40049, 1.4), (123.456, 123.5), (12345.6, 12346.0), (235146, 235146.0), (0.0, 0.0)],
)
def test_numbers_have_four_significant_digits_or_are_whole(value: float, shown: float) -> None:
    assert rounded(value) == shown
    assert rounded(-value) == -shown


def test_view_is_written_once_and_its_sections_have_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, str] = {}

    def write(_: str, key: str, value: str) -> None:
        assert key not in written, "the experiment has it"
        written[key] = value

    monkeypatch.setattr(ui_view, "experiment_id", lambda *_: "1")
    store: Any = SimpleNamespace(get_experiment=lambda _: SimpleNamespace(tags=written), set_experiment_tag=write)
    assert share_view(store) == share_view(store)
    assert written.keys() == {"mlflow.sharedViewState.gradtrail"}
    assert view_state()["selectedColumns"][0] == "metrics.`eval/accuracy`"
    charts = view_state()["compareRunCharts"]
    assert {chart["metricSectionId"] for chart in charts} == {one["uuid"] for one in view_state()["compareRunSections"]}
    assert len({chart["uuid"] for chart in charts}) == len(charts)


def test_trainings_without_a_colour_get_the_rarest_one_and_others_keep_theirs() -> None:
    def run(number: int, **tags: str) -> Any:
        info = SimpleNamespace(run_id=str(number), start_time=number)
        return SimpleNamespace(info=info, data=SimpleNamespace(tags=tags))

    colors: dict[str, str] = {}
    store: Any = SimpleNamespace(set_tag=lambda run_id, key, color: colors.update({run_id: color}))
    blue, vermillion, *_ = ui_view._COLORS
    coloured = [run(number, variant="v", **{"mlflow.runColor": color}) for number, color in ((8, blue), (9, "#123456"))]
    ui_view.color_trainings(store, [*coloured, *(run(number, variant="v") for number in range(8)), run(10)])
    assert colors.keys() == {str(number) for number in range(8)}
    assert colors["0"] == vermillion
    assert sorted(colors.values()) == sorted(ui_view._COLORS)
