"""Weights round-trip to the bit, damaged files are refused; a calibration applies to the weights it was fitted for."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from factories import dataset_info, model_config
from fuzzing import refusal
from safetensors import safe_open
from safetensors.numpy import save_file

from gradtrail.core.evaluate import Evaluation, evaluate_logits
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.models import Model
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.params import as_written
from gradtrail.stages.model.calibration import read_evaluated, warn_of_few, write_calibration
from gradtrail.stages.model.members import weights_paths, write_seeds
from gradtrail.stages.model.weights import WeightsInfo, read_weights, require_same_data, write_weights
from gradtrail.support.errors import UserError

INFO = WeightsInfo(model=model_config(), loss=CrossEntropy(label_smoothing=0.1), dataset=dataset_info(), epoch=3)
PARAMS = jax.device_get(jax.jit(lambda key: Model(INFO.model).init(key=key))(jax.random.key(0)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_weights(tmp_path / "models" / "final.safetensors", PARAMS, INFO)
    return tmp_path / "models" / "final.safetensors"


def rewrite(path: Path, tensors: dict[str, Any] | None = None, **metadata: str) -> None:
    """Write the file again with some tensors changed (None: left out), or with other metadata."""
    with safe_open(path, framework="numpy") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        described = file.metadata()
    remaining = {name: tensor for name, tensor in {**read, **(tensors or {})}.items() if tensor is not None}
    save_file(remaining, path, metadata=metadata or described)


def test_weights_come_back_to_the_bit_with_their_model(path: Path) -> None:
    model, params, info = read_weights(path)
    assert info == INFO
    assert model.config == INFO.model
    assert jax.tree.structure(params) == jax.tree.structure(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_special_numbers_keep_their_bits(tmp_path: Path) -> None:
    special = np.array([np.nan, -0.0, np.inf, np.finfo(np.float32).smallest_subnormal], np.float32)
    params = jax.tree.map(lambda leaf: np.resize(special, leaf.shape), PARAMS)
    write_weights(tmp_path / "w", params, INFO)
    restored = read_weights(tmp_path / "w")[1]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, (restored, params)), strict=True))


def test_equal_weights_are_equal_bytes_in_every_process(tmp_path: Path) -> None:
    """Another digest is right only where the format changes on purpose: all weights in DVC's cache then change too."""
    params = jax.tree.map(lambda leaf: np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape), PARAMS)
    write_weights(tmp_path / "w", params, INFO)
    assert digest(tmp_path / "w") == "d009c5bacbcbe72c2c36ab7a2ed7c4d5"


def test_tensors_are_readable_by_safetensors(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {f"layers/{n}/{part}" for n in (0, 1) for part in ("kernel", "bias")}
        np.testing.assert_array_equal(file.get_tensor("layers/0/kernel"), PARAMS["layers"][0]["kernel"])


class Bomb:
    def __reduce__(self) -> tuple:
        return pytest.fail, ("a pickle was read",)


BIAS = np.asarray(PARAMS["layers"][0]["bias"])
FLIPPED = (BIAS.view(np.uint32) ^ np.uint32(1)).view(np.float32)
MODEL_WITHOUT_PRECISION = {key: value for key, value in as_written(INFO.model).items() if key != "precision"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: rewrite(path, {"layers/0/bias": None}), "not those that were written"),
        (lambda path: rewrite(path, {"layers/0/bias": FLIPPED}), "not those that were written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), ""),
        (lambda path: path.write_bytes(pickle.dumps(Bomb())), ""),
        (lambda path: rewrite(path, other="1"), "no weights file of this project"),
        (
            lambda path: rewrite(path, gradtrail=json.dumps(as_written(INFO) | {"model": MODEL_WITHOUT_PRECISION})),
            "model.precision",
        ),
        (Path.unlink, "dvc repro"),
    ],
)
def test_changed_foreign_or_missing_file_is_refused(damage: Callable[[Path], object], message: str, path: Path) -> None:
    damage(path)
    line = str(refusal(lambda: read_weights(path)))
    assert line.startswith(f"{path}: ")
    assert message in line


def test_weights_of_other_data_are_refused(path: Path) -> None:
    require_same_data(path, INFO, dataset_info())
    with pytest.raises(UserError, match="trained on other data"):
        require_same_data(path, INFO, dataset_info(digest="cd" * 32))


def result_at(temperature: float) -> Evaluation:
    return evaluate_logits(np.log([[0.7, 0.3]]), np.array([0]), temperature=temperature, calibration_bins=2)


RESULT = result_at(0.5)


def test_evaluated_weights_are_those_with_the_same_bytes(tmp_path: Path) -> None:
    """In an ensemble, of all members; the temperature is its own."""
    write_seeds(tmp_path, [3, 4])
    paths = weights_paths(tmp_path, "best")
    for path in paths.values():
        path.parent.mkdir()
        path.write_text(str(path))
    members = dict(zip(paths.values(), map(result_at, (0.5, 0.7)), strict=True))
    write_calibration(tmp_path / "results", members, result_at(1.5), num_examples=3)
    evaluated = read_evaluated(tmp_path / "results", tmp_path)
    assert (evaluated.kind, evaluated.weights, evaluated.temperature) == ("best", paths, 1.5)
    assert evaluated.calibration_error == result_at(1.5).scores["expected_calibration_error"]
    paths[4].write_text("other weights")
    with pytest.raises(UserError, match="belongs to other weights"):
        read_evaluated(tmp_path / "results", tmp_path)


def test_it_holds_the_scores_before_and_after(tmp_path: Path) -> None:
    weights = tmp_path / "final.safetensors"
    weights.write_bytes(b"weights")
    write_calibration(tmp_path, {weights: RESULT}, RESULT, num_examples=3)
    result = json.loads((tmp_path / "calibration.json").read_text())
    assert result["fitted_on"] == {"split": "validation", "num_examples": 3, "lowest": 0.05, "highest": 20.0}
    assert result["uncalibrated"]["brier"]["value"] == pytest.approx(2 * 0.3**2)
    assert result["calibrated"]["brier"]["value"] == pytest.approx(2 * (0.09 / 0.58) ** 2)


@pytest.mark.parametrize(("num_examples", "is_told"), [(3, True), (199, True), (200, False)])
def test_a_temperature_of_few_images_is_told(
    num_examples: int, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_few(num_examples)
    line = capsys.readouterr().err
    told = f"evaluate: warning: the temperature was fitted on {num_examples} validation images, so probabilities "
    assert (line.startswith(told), line.count("\n")) == (is_told, int(is_told))
    assert not is_told or "preprocess.validation_fraction" in line
