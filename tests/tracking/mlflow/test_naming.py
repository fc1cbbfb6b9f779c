"""The description of a run: its metrics, its main figure, the summary of its gradients, and its lineage."""

import pytest

from gradtrail.tracking.mlflow.naming import note, summary_in

RUN = "0123456789abcdef" * 2
TAGS = {"stage": "train", "dataset": "digits", "dataset_digest": "ab" * 32, "mlflow.source.git.commit": "c" * 40}
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
    text = note(RUN, TAGS, METRICS, SUMMARY)
    assert text.startswith("**98.59%** of the test images are classified correctly (95 % interval: 98.34% to 98.80%).")
    assert "| epochs | parameters | noise scale |\n| --- | --- | --- |\n| 10 | 235,146 | 277 |" in text
    assert f"![Learning curves](get-artifact?path=results%2Flearning_curves.png&run_uuid={RUN})" in text
    assert "### What the gradients say\n\n#### Largest gradients\n\nThe largest is 18.\n\n#### Noise" in text
    assert text.rstrip().endswith(
        "Data set digits abababab. Code of commit `cccccccc`. `gradtrail show 01234567` prints its lineage and how to "
        "restore its files."
    )


def test_before_the_evaluation_it_says_so() -> None:
    assert note(RUN, TAGS, {}, "").startswith("Not evaluated yet: run `dvc repro`.\n\n![Learning curves]")


def test_changes_and_experiments_are_named() -> None:
    text = note(RUN, TAGS | {"git.dirty": "true", "dvc.exp_name": "famed-eel"}, METRICS, "")
    assert "Code of commit `cccccccc`, with changes (`git.diff`). Experiment `famed-eel`." in text


@pytest.mark.parametrize("stage", ["train", "gradients"])
def test_what_the_gradients_say_goes_from_note_to_note_unchanged(stage: str) -> None:
    told = note(RUN, TAGS | {"stage": stage}, {}, SUMMARY)
    taken = summary_in(told)
    assert taken.startswith("### What the gradients say")
    assert taken.endswith("It is 277.")
    again = note("f" * 32, TAGS, METRICS, taken)
    assert summary_in(again) == taken


def test_a_note_without_it_has_none() -> None:
    assert summary_in(note(RUN, TAGS, METRICS, "")) == ""
    assert summary_in("") == ""
