"""The name of a run, its description, and the shared views of the UI."""

import base64
import itertools
import json
import zlib
from typing import Any

import pytest
from factories import ROOT

from gradtrail.stages.common.params import flatten, read_yaml
from gradtrail.stages.common.pipeline_file import StageSpec, read_pipelines
from gradtrail.tracking.mlflow import naming
from gradtrail.tracking.mlflow.naming import name_of, note, summary_in
from gradtrail.tracking.mlflow.ui_view import View, shared_views, write_views

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


@pytest.mark.parametrize("stage", ["train", "gradients"])
def test_summary_of_gradients_passes_from_note_to_note_unchanged(stage: str) -> None:
    text = note(RUN, TAGS | {"stage": stage}, PARAMS, {}, SUMMARY)
    summary = summary_in(text)
    assert summary.startswith("### What the gradients say")
    assert summary.endswith("It is 277.")
    again = note("f" * 32, TAGS, PARAMS, METRICS, summary)
    assert summary_in(again) == summary


TRAINING = {key: value for key, value in naming._reference().items() if key.split(".")[0] in naming._WITHOUT_SECTION}


def named(stage: str = "train", **changes: Any) -> str:
    return name_of(stage, TRAINING | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "mlp"),
        ({"train__seed": 1}, "mlp · seed 1"),
        ({"train__model": "cnn", "train__optimizer": "sgd", "train__seed": 2}, "cnn · sgd · seed 2"),
        ({"train__model": "linear", "train__schedule": "linear"}, "linear model · linear"),
        ({"train__mlp__hidden": [64], "train__epochs": 1, "train__batch_size": 512}, "mlp-64 · 1 epoch · batch 512"),
        ({"fetch__dataset": "digits", "preprocess__label_noise": 0.1}, "digits · label noise 10 %"),
        ({"train__precision": "bfloat16", "train__adamw__learning_rate": 0.01}, "bfloat16 · lr 0.01"),
        ({"train__remat": True, "train__clip_norm": None, "train__keep_epochs": [0, 9]}, "remat · no clip · keep 0,9"),
        ({"train__cnn__dropout": 0.5}, "mlp · unused train.cnn.dropout 0.5"),
    ],
)
def test_a_name_says_what_differs_from_the_reference(changes: dict[str, Any], name: str) -> None:
    assert named(**changes) == name


def test_no_two_changes_of_one_param_or_of_two_give_the_same_name() -> None:
    variants: list[dict[str, Any]] = [{}]
    for key, value in TRAINING.items():
        if isinstance(value, bool):
            variants.append({key: not value})
        elif isinstance(value, int | float):
            variants += [{key: value + 1}, {key: value + 2}]
        else:
            variants += [{key: [*value, 7] if isinstance(value, list) else f"{value}x"}]
    pairs = [one | other for one, other in itertools.combinations(variants, 2)]
    all_changes = [*variants, *pairs]
    distinct = {tuple(sorted((key, str(value)) for key, value in change.items())): change for change in all_changes}
    names = [name_of("train", TRAINING | change) for change in distinct.values()]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 250


def test_a_long_name_is_cut_and_stays_distinct() -> None:
    long = [named(environment__xla_flags=["x" * 300 + end]) for end in "ab"]
    assert [len(name) for name in long] == [250, 250]
    assert long[0] != long[1]


def test_the_reference_has_every_param_and_names_do_not_follow_params_yaml() -> None:
    params = flatten({key: value for key, value in read_yaml(ROOT / "params.yaml").items() if key != "runtime"})
    assert params.keys() == naming._reference().keys(), "add the new param with its first value"


VIEWS = shared_views(read_pipelines(ROOT))
TRAININGS, COMPILING, FUNCTIONS = VIEWS
BOTH = pytest.mark.parametrize("view", [TRAININGS, COMPILING], ids=lambda view: view.key)


def state(view: View) -> dict[str, Any]:
    kind, _, content = view.state().partition(";")
    assert kind == "deflate"
    content_of_view: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(content)))
    return content_of_view


@BOTH
def test_charts_of_seconds_are_grouped_by_machine_and_show_every_run(view: View) -> None:
    assert any("seconds" in chart["metricKey"] for chart in state(view)["compareRunCharts"])
    assert state(view)["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "machine"}]
    assert not state(view)["useGroupedValuesInCharts"], "a mean over runs is none of a run"
    assert "tags.`machine`" in state(view)["selectedColumns"]


def test_a_new_stage_that_compiles_below_training_has_charts() -> None:
    costs = ("results/costs/toy.json", "results/toy")
    toy = StageSpec(cmd="it", deps=("models/final.safetensors",), params={}, outs=costs)
    unrelated = StageSpec(cmd="it", deps=("data/raw",), params={}, outs=("results/costs/beside.json",))
    _, compiling, _ = shared_views(read_pipelines(ROOT) | {"toy": toy, "beside": unrelated})
    drawn = {chart["metricKey"] for chart in state(compiling)["compareRunCharts"]}
    assert {key for key in drawn if key.startswith("toy/")} == {
        f"toy/compile_{kind}" for kind in ("total_seconds", "cache_hit_rate", "unplanned")
    }
    assert not any(key.startswith("beside/") for key in drawn), "its runs are in another experiment"


def test_the_views_differ_and_are_written_once() -> None:
    class Store:
        def __init__(self) -> None:
            self.tags: dict[str, str] = {}
            self.written = 0

        def get_experiment(self, _: str) -> "Store":
            return self

        def set_experiment_tag(self, _: str, key: str, value: str) -> None:
            self.tags[key] = value
            self.written += 1

    store: Any = Store()
    write_views(store, "1", VIEWS)
    write_views(store, "1", VIEWS)
    assert store.tags == {f"mlflow.sharedViewState.{view.key}": view.state() for view in VIEWS}
    assert store.written == len(VIEWS) == 3
