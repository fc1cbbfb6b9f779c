"""The scores in float64 are those of the definitions, agree with the passes', and leave nothing behind."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import NUM_CLASSES, initial_params, model_config, new_compiler, random_split

from gradtrail.core.gradients import scores
from gradtrail.core.gradients.exact import LIMITS, compile_exact, exact_scores, float64_errors, sample_size
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.models import Model
from gradtrail.core.xla.compile_log import CompileLog
from gradtrail.core.xla.compiler import Compiler

SMOOTHING = 0.1
LOSS = CrossEntropy(label_smoothing=SMOOTHING)
SPLITS = {"train": random_split(7), "test": random_split(4)}
IMAGES, LABELS = (np.concatenate([getattr(part, name) for part in SPLITS.values()]) for name in ("images", "labels"))


@functools.cache
def network(kind: str = "mlp", precision: str = "float32") -> tuple[Any, Any, Compiler]:
    """Return parameters, the compiled float64 gradients for the sample, and what compiled them."""
    model, compiler = Model(model_config(kind, precision=precision)), new_compiler()
    params = jax.tree.map(np.asarray, initial_params(model))
    return params, compile_exact(model, LOSS, sample_size(SPLITS), compiler=compiler), compiler


@functools.cache
def fast_scores(kind: str = "mlp", precision: str = "float32") -> dict[str, dict[str, np.ndarray]]:
    score = functools.partial(scores.score_batch, Model(model_config(kind, precision=precision)), loss=LOSS)
    result = jax.jit(score)(network(kind, precision)[0], IMAGES, LABELS)
    first = len(SPLITS["train"])
    return {
        "train": {name: np.array(rows)[:first] for name, rows in result.items()},
        "test": {name: np.array(rows)[first:] for name, rows in result.items()},
    }


def test_exact_scores_equal_a_network_written_out() -> None:
    params, function, _ = network()
    (first, second), wide = (params["layers"][index] for index in (0, 1)), np.float64
    result = exact_scores(function, params, IMAGES, LABELS)
    for row, (image, label) in enumerate(zip(IMAGES.reshape(len(IMAGES), -1) / 255, LABELS.tolist(), strict=True)):
        hidden = np.maximum(image @ first["kernel"].astype(wide) + first["bias"], 0)
        logits = hidden @ second["kernel"].astype(wide) + second["bias"]
        softmax, is_label = np.exp(logits) / np.sum(np.exp(logits)), np.eye(NUM_CLASSES)[label]
        target = (1 - SMOOTHING) * is_label + SMOOTHING / NUM_CLASSES
        upper = softmax - target
        lower = (second["kernel"].astype(wide) @ upper) * (hidden > 0)
        squares = [np.sum(part**2) * (1 + np.sum(identity**2)) for part, identity in ((lower, image), (upper, hidden))]
        expected = {
            "grad_norm": sum(squares) ** 0.5,
            "grad_norm_layers/0": squares[0] ** 0.5,
            "grad_norm_layers/1": squares[1] ** 0.5,
            "loss": -np.sum(target * np.log(softmax)),
            "probability": softmax[label],
            "el2n": np.linalg.norm(softmax - is_label),
            "margin": logits[label] - np.delete(logits, label).max(),
            "entropy": -np.sum(softmax * np.log(softmax)),
        }
        assert {name: values[row] for name, values in result.items()} == pytest.approx(expected, rel=1e-12)


def errors_of(result: dict[str, dict[str, np.ndarray]], *which: str) -> dict[str, float]:
    params, function, _ = network(*which)
    return float64_errors(function, params, SPLITS, result)


@pytest.mark.parametrize("which", [("mlp", "float32"), ("cnn", "float32"), ("mlp", "bfloat16")])
def test_scores_of_the_passes_differ_by_rounding(which: tuple[str, str]) -> None:
    errors = errors_of(fast_scores(*which), *which)
    names = ("grad_norm", "grad_norm_by_layer", "el2n", "loss", "probability", "margin", "entropy")
    assert errors.keys() == {f"float64_error/{name}" for name in names}
    least, most = (0, 1e-5) if which[1] == "float32" else (1e-5, LIMITS["bfloat16"])
    assert all(least < error < most for error in errors.values()), "and the reference is not rounded as the model is"


def test_one_wrong_score_is_reported_with_two_digits() -> None:
    result = {name: dict(part) for name, part in fast_scores().items()}
    wrong = result["test"]["loss"].copy()
    wrong[np.argmax(wrong)] *= np.float32(1.01234)
    result["test"]["loss"] = wrong
    errors = errors_of(result)
    is_largest = wrong.max() > result["train"]["loss"].max()
    assert errors.pop("float64_error/loss") == (0.012 if is_largest else pytest.approx(0.012, rel=0.5))
    assert max(errors.values()) < 1e-5


def test_float64_stays_in_its_calls_and_is_compiled_ahead_of_time() -> None:
    (_, function, compiler), result, kinds = network(), fast_scores(), []
    with CompileLog() as log:
        first = errors_of(result)
        thread = threading.Thread(target=lambda: kinds.append(jnp.ones(2).dtype))
        with jax.enable_x64(True):
            thread.start()
            thread.join()
        assert errors_of(result) == first
    assert [*compiler.functions.values()] == [function]
    assert function.cost.float64_instructions > 0
    assert not any("float64" in str(compilation) for compilation in log.unplanned)
    assert [*kinds, jnp.ones(2).dtype] == ["float32", "float32"]


def test_the_sample_is_evenly_spaced_over_all_splits() -> None:
    assert sample_size(SPLITS) == 11
    assert sample_size({"train": random_split(300), "test": random_split(5)}) == 200
