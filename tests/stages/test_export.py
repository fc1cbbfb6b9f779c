"""An export has the same bytes wherever it is made, and answers and metrics are those of the evaluated networks."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from exports import SHAPE, random_params, small_network, write_small_export
from factories import dataset_info, model_config, new_compiler, random_split
from projects import ROOT

from gradtrail.core.data import Split
from gradtrail.core.export import ExportConfig, forward, tensors
from gradtrail.core.intervals import Interval, share_interval
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.models import Model
from gradtrail.stages import export
from gradtrail.stages.common.files import digest
from gradtrail.stages.export import read_network, write_export
from gradtrail.stages.model.calibration import Evaluated
from gradtrail.stages.model.exported import export_name, read_export
from gradtrail.stages.model.weights import WeightsInfo, write_weights
from gradtrail.support.errors import UserError


def test_each_served_batch_size_is_equal_to_the_jitted_forward_pass(tmp_path: Path) -> None:
    network = small_network(model="cnn", members=2)
    write_export(tmp_path / "export", network, ExportConfig(name="digits", batch_sizes=(1, 8, 32), precisions=()))
    exported, jitted = read_export(tmp_path / "export"), jax.jit(forward(network.model, 2))
    leaves = tensors([*network.members.values()], network.temperature)
    for size in exported.manifest.batch_sizes:
        images = random_split(size, shape=SHAPE).images
        exported.compile(size)
        np.testing.assert_array_equal(np.asarray(exported.run(images)), np.asarray(jitted(leaves, images)))


def test_program_in_another_precision_rounds_the_operands_of_the_same_weights(tmp_path: Path) -> None:
    folder = write_small_export(tmp_path / "export", model="linear", precisions=("bfloat16",))
    plain = write_small_export(tmp_path / "plain", model="linear")
    assert {path.name for path in folder.iterdir()} - {path.name for path in plain.iterdir()} == {
        "forward.cpu.bfloat16.bin",
        "forward.cuda.bfloat16.bin",
    }
    images, network = random_split(8, shape=SHAPE).images, small_network(model="linear")
    layer = network.members[0]["layers"][0]
    operands = {
        "": [(images.reshape(8, -1) / np.float32(255)).astype(np.float32), layer["kernel"]],
    }
    operands["bfloat16"] = [one.astype(ml_dtypes.bfloat16) for one in operands[""]]
    answers = {}
    for precision, (inputs, kernel) in operands.items():
        logits = (inputs.astype(np.float64) @ kernel.astype(np.float64) + layer["bias"]) / network.temperature
        expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        answers[precision] = read_export(folder, precision).predict(images)
        np.testing.assert_allclose(answers[precision], expected, rtol=1e-5)
    np.testing.assert_array_equal(answers[""], read_export(plain).predict(images))
    assert np.abs(answers[""] - answers["bfloat16"]).max() > 1e-4, "the test would not see a wrong precision"
    with pytest.raises(UserError, match=re.escape("forward.cpu.float16.bin; export.precisions of params.yaml adds it")):
        read_export(folder, "float16")


@pytest.mark.slow
def test_two_checkouts_in_different_folders_write_the_same_bytes(tmp_path: Path) -> None:
    """Each with the code and the working folder of its own."""
    digests = set()
    for name in ("one", "a/longer/path/to/another"):
        place = tmp_path / name
        shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        code = (
            "from pathlib import Path\n"
            "import exports\n"
            "exports.write_small_export(Path('models/export').resolve(), model='cnn', members=2)"
        )
        env = os.environ | {"PYTHONPATH": f"{place}/src:{place}/tests/support_code"}
        subprocess.run([sys.executable, "-c", code], cwd=place, env=env, check=True)
        digests.add(digest(place / "models/export"))
        written = b"".join(path.read_bytes() for path in (place / "models/export").iterdir())
        assert str(tmp_path).encode() not in written
        assert b".py" not in written
    assert len(digests) == 1


def evaluated(*paths: Path) -> Evaluated:
    error = Interval(value=0.1, low=0.0, high=0.2)
    return Evaluated(kind="best", weights=dict(enumerate(paths, 3)), temperature=0.5, calibration_error=error)


def test_evaluated_networks_are_exported(tmp_path: Path) -> None:
    model, paths = Model(model_config()), [tmp_path / f"{seed}.safetensors" for seed in (3, 4)]
    for seed, path in enumerate(paths, 3):
        info = WeightsInfo(
            model=model.config, loss=CrossEntropy(label_smoothing=0.1), dataset=dataset_info(), epoch=seed
        )
        write_weights(path, random_params(model, seed), info)
    network = read_network(evaluated(*paths), dataset_info())
    assert (network.weights, network.epochs, network.temperature) == ("best", (3, 4), 0.5)
    assert network.classes == ("0", "1", "2")
    jax.tree.map(np.testing.assert_array_equal, network.members, {seed: random_params(model, seed) for seed in (3, 4)})
    with pytest.raises(UserError, match="trained on other data"):
        read_network(evaluated(*paths), dataclasses.replace(dataset_info(), digest="1" * 64))


SPLIT = random_split(21, shape=SHAPE)
EVALUATED = Evaluated(
    kind="final", weights={}, temperature=0.5, calibration_error=Interval(value=0.1, low=0.0, high=0.2)
)


def predictions(probabilities: np.ndarray, split: Split = SPLIT) -> pd.DataFrame:
    table = {"example_id": split.example_id, "label": split.labels, "predicted": probabilities.argmax(axis=1)}
    return pd.DataFrame(table | {f"probability_{label}": column for label, column in enumerate(probabilities.T)})


def test_metrics_of_an_export(tmp_path: Path) -> None:
    folder = write_small_export(tmp_path / "export", model="linear", batch_sizes=(8,))
    exported = read_export(folder)
    probabilities = export.answers(exported, export.compile_largest(exported, compiler=new_compiler()), SPLIT)
    np.testing.assert_array_equal(probabilities, exported.predict(SPLIT.images))
    changed = probabilities.copy()
    changed[4] = np.roll(changed[4], 1)
    evaluated = predictions(changed)
    metrics = export.measure(folder, EVALUATED, evaluated, probabilities)

    is_correct = np.asarray(evaluated["predicted"]) == SPLIT.labels
    recalls = {label: is_correct[SPLIT.labels == label] for label in np.unique(SPLIT.labels)}
    worst = min(recalls, key=lambda label: recalls[label].mean())
    assert metrics["accuracy"] == is_correct.mean()
    accuracy = share_interval(int(is_correct.sum()), 21)
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == (accuracy.low, accuracy.high)
    assert (metrics["worst_class"], metrics["worst_class_recall"]) == (worst, recalls[worst].mean())
    assert metrics["worst_class_recall_low"] == share_interval(int(recalls[worst].sum()), len(recalls[worst])).low
    assert [metrics[f"expected_calibration_error{end}"] for end in ("_low", "", "_high")] == [0.0, 0.1, 0.2]
    assert metrics["largest_difference"] == np.abs(probabilities[4] - changed[4]).max() > 0
    assert metrics["num_other_labels"] == 1
    assert metrics["size_bytes"] == sum(path.stat().st_size for path in folder.iterdir())


def test_predictions_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = predictions(np.full((21, 3), 1 / 3, np.float32))
    table.to_parquet(tmp_path / "predictions.parquet", index=False)
    pd.testing.assert_frame_equal(export.read_evaluation(tmp_path, SPLIT, 3), table)
    with pytest.raises(UserError, match="belongs to another test split"):
        export.read_evaluation(tmp_path, dataclasses.replace(SPLIT, labels=SPLIT.labels[::-1].copy()), 3)


@pytest.mark.parametrize(
    ("name", "dataset", "expected"),
    [(None, "mnist 12345678", "digits"), (None, "digits", "digits"), (None, "folder", "folder"), ("a", "mnist", "a")],
)
def test_model_has_the_name_of_its_data_set_by_default(name: str | None, dataset: str, expected: str) -> None:
    assert export_name(name, dataset) == expected
