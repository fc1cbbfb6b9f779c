"""The name of a run, and its description: metrics, main figure, the summary of its gradients, and lineage."""

import itertools
from typing import Any

import pytest
from factories import ROOT

from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.common.params import read_yaml
from gradtrail.tracking.mlflow import naming
from gradtrail.tracking.mlflow.naming import NOTE, is_headline, is_logged, name_of, note, precision_note, summary_in

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


def test_a_training_shows_its_accuracy_its_metrics_and_its_lineage() -> None:
    text = note(RUN, TAGS, PARAMS, METRICS, SUMMARY)
    assert text.startswith("**98.59% of the test images are classified correctly** (95 % interval: 98.34% to 98.80%).")
    assert "\n\n235,146 parameters, 10 epochs. Gradient noise scale 277 examples.\n\n" in text
    assert f"![Learning curves](get-artifact?path=description.png&run_uuid={RUN})" in text
    assert "### What the gradients say\n\n#### Largest gradients\n\nThe largest is 18.\n\n#### Noise" in text
    assert text.rstrip().endswith(
        "Data set digits abababab. Code of commit `cccccccc`. `gradtrail show 01234567` prints its lineage and how to "
        "restore its files."
    )


def test_a_private_training_says_what_is_not_covered() -> None:
    spent = METRICS | {"train/epsilon": 2.98, "train/delta": 1e-5}
    text = note(RUN, TAGS, PARAMS, spent, "")
    assert "**Private: epsilon 2.98 at delta 1e-05** for each training example. Training loss and accuracy" in text
    published = note(RUN, TAGS, PARAMS | {"train.privacy.release": "true"}, spent, "")
    assert "nothing here comes from training examples without noise." in published
    assert "epsilon" not in note(RUN, TAGS | {"stage": "evaluate"}, PARAMS, spent, "")


def test_note_of_several_members_has_mean_and_ensemble() -> None:
    spread, params = {"eval/accuracy_sd": 0.0009, "eval/ensemble_accuracy": 0.9880}, PARAMS | {"train.members": "5"}
    text = note(RUN, TAGS, params, METRICS | spread | {"eval/ensemble_loss": 0.041}, "")
    assert text.startswith(
        "**Mean over 5 seeds: 98.59% of the test images are classified correctly** (95 % interval: 98.34% to 98.80%, "
        "sd 0.09%); by their ensemble **98.80%**."
    )
    assert "Of the ensemble" not in text, "only where both are known"
    metrics_of_ensemble = spread | {"eval/ensemble_loss": 0.041, "eval/ensemble_expected_calibration_error": 0.0025}
    assert "Of the ensemble: test loss 0.0410 nats, calibration error 0.0025." in note(
        RUN, TAGS, params, METRICS | metrics_of_ensemble, ""
    )


def test_runs_show_the_spread_of_accuracies_alone() -> None:
    means = {"accuracy": 0.9, "validation_accuracy": 0.8, "validation_loss": 0.3, "loss": 0.2, "best_epoch": 2.5}
    several = {f"{key}{end}": value for key, value in means.items() for end in ("", "_sd", "_low", "_high")}
    several |= {"members": 3, "epochs": 4, "dataset": "digits"}
    logged = {key for key in several if is_logged("train", key, several)}
    assert logged == {
        *("accuracy", "validation_accuracy", "validation_loss", "loss", "epochs"),
        *(f"validation_accuracy_{end}" for end in ("low", "high")),
    }
    evaluated = {"accuracy": 0.9, "accuracy_sd": 0.1, "accuracy_low": 0.8, "accuracy_high": 0.9, "loss": 1.0}
    evaluated |= {"loss_sd": 0.1, "ensemble_accuracy": 0.9, "ensemble_accuracy_low": 0.8, "members": 3}
    hidden = {key for key in evaluated if not is_logged("evaluate", key, evaluated)}
    assert hidden == {"loss_sd", "members"}


def test_changes_and_experiments_are_named() -> None:
    text = note(RUN, TAGS | {"git.dirty": "true", "dvc.exp_name": "famed-eel"}, PARAMS, METRICS, "")
    assert "Code of commit `cccccccc`, with changes (`git.diff`). Experiment `famed-eel`." in text


def ratio(value: float, low: float, high: float, precision: str = "bfloat16") -> dict[str, float]:
    name = f"profile/{precision}_over_float32"
    return {name: value, f"{name}_low": low, f"{name}_high": high}


SLOWER = "bfloat16 is 1.40 × slower than float32 on this machine at batch size 128 (95 % interval 1.35 to 1.46)."
FASTER = "bfloat16 is 1.25 × faster than float32 on this machine at batch size 128 (95 % interval 1.11 to 1.43)."


@pytest.mark.parametrize(
    ("metrics", "precision", "message"),
    [
        (ratio(1.4, 1.35, 1.46), "bfloat16", SLOWER),
        (ratio(1.4, 1.35, 1.46), "float32", ""),
        (ratio(0.8, 0.7, 0.9), "float32", FASTER),
        (ratio(0.8, 0.7, 0.9), "bfloat16", ""),
        (ratio(1.4, 0.9, 1.9), "bfloat16", ""),  # may be chance
        (ratio(0.8, 0.5, 1.1), "float32", ""),
        (ratio(1.02, 1.01, 1.03), "bfloat16", ""),  # hardly matters
        (ratio(1.4, 1.35, 1.46, "float16"), "bfloat16", ""),  # of another precision
        ({}, "bfloat16", ""),
        ({"profile/bfloat16_over_float32": 1.4}, "bfloat16", ""),  # no interval
    ],
)
def test_note_names_a_precision_that_costs_or_would_save_time(
    metrics: dict[str, float], precision: str, message: str
) -> None:
    assert precision_note(metrics, precision, 128) == message


@pytest.mark.parametrize("stage", ["train", "gradients"])
def test_summary_of_gradients_passes_from_note_to_note_unchanged(stage: str) -> None:
    text = note(RUN, TAGS | {"stage": stage}, PARAMS, {}, SUMMARY)
    summary = summary_in(text)
    assert summary.startswith("### What the gradients say")
    assert summary.endswith("It is 277.")
    again = note("f" * 32, TAGS, PARAMS, METRICS, summary)
    assert summary_in(again) == summary


def test_figure_of_an_earlier_description_stays() -> None:
    before = f"![Learning curves](get-artifact?path=results%2Flearning_curves.png&run_uuid={RUN})"
    assert before in note(RUN, TAGS | {NOTE: f"Some words.\n\n{before}\n\nMore."}, PARAMS, METRICS, "")


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


def test_the_names_of_other_stages_begin_with_the_stage() -> None:
    assert named("evaluate") == "evaluate"
    assert named("evaluate", train__model="cnn", evaluate__weights="best") == "evaluate · cnn · evaluate weights best"
    assert named("report", evaluate__weights="best") == "report · evaluate weights best"
    assert name_of("toy", {"toy.length": 3}) == "toy · toy length 3"


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


def test_trainings_show_the_headlines_of_their_children() -> None:
    assert is_headline("eval/accuracy", "evaluate")
    assert not is_headline("eval/num_examples", "evaluate")
    assert not is_headline("gradients/compile_total_seconds", "gradients")
    assert not is_headline("report/size_bytes", "report")
    assert is_headline("toy/length", "toy")
    assert not is_headline("toy/by_class/length", "toy")
