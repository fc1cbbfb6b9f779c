"""What each optimizer does to parameters, step by step, against NumPy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import OPTIMIZERS
from optax import contrib

from gradtrail.core.train.optimizers import (
    SGD,
    Adam,
    AdamW,
    Lion,
    Muon,
    Optimizer,
    RMSprop,
    make_optimizer,
    squared_norm,
)
from gradtrail.core.train.schedules import Constant, Linear, Schedule

NUM_STEPS = 4
RATES = 0.1 * np.array([1, 0.75, 0.5, 0.25])
SCHEDULE = Linear(end_fraction=0.0)
RMSPROP = {"decay": 0.8, "eps": 1e-3, "momentum": 0.9}
ADAM = {"b1": 0.8, "b2": 0.9, "eps": 1e-3}
PARAMS = {"kernel": np.float32([[2, -1], [0.5, 3], [1, 1]]), "bias": np.float32([2, -2])}
DRAWN = np.random.default_rng(0).normal(size=(NUM_STEPS, 8)).astype(np.float32)
GRADS = [{"kernel": row[:6].reshape(3, 2), "bias": row[6:]} for row in DRAWN]


def run(
    rule: Optimizer,
    grads: list[dict] = GRADS,
    params: dict = PARAMS,
    *,
    schedule: Schedule = SCHEDULE,
    clip_norm: float | None = None,
) -> list[dict]:
    """Return the parameters before the first step and after each."""
    optimizer = make_optimizer(rule, schedule, clip_norm, NUM_STEPS)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: dict, state: Any, grads: dict) -> tuple[dict, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    trail = [params]
    for grad in grads:
        params, state = step(trail[-1], state, grad)
        trail.append(params)
    return trail


def sgd(grads: np.ndarray, *, momentum: float, nesterov: bool) -> list[np.ndarray]:
    """Return what the learning rate is multiplied by in each step."""
    trace, directions = np.zeros_like(grads[0]), []
    for grad in grads:
        trace = grad + momentum * trace
        directions.append(grad + momentum * trace if nesterov else trace)
    return directions


def adam(grads: np.ndarray, *, b1: float, b2: float, eps: float) -> list[np.ndarray]:
    first, second, directions = np.zeros_like(grads[0]), np.zeros_like(grads[0]), []
    for step, grad in enumerate(grads, start=1):
        first, second = b1 * first + (1 - b1) * grad, b2 * second + (1 - b2) * grad**2
        directions.append(first / (1 - b1**step) / (np.sqrt(second / (1 - b2**step)) + eps))
    return directions


def rmsprop(grads: np.ndarray, *, decay: float, eps: float, momentum: float) -> list[np.ndarray]:
    """Optax multiplies by the rate before the momentum, which for a falling rate is another trace."""
    second, trace, directions = np.zeros_like(grads[0]), np.zeros_like(grads[0]), []
    for rate, grad in zip(RATES, grads, strict=True):
        second = decay * second + (1 - decay) * grad**2
        trace = momentum * trace + rate * grad / np.sqrt(second + eps)
        directions.append(trace / rate)
    return directions


def lion(grads: np.ndarray, *, b1: float, b2: float) -> list[np.ndarray]:
    momentum, directions = np.zeros_like(grads[0]), []
    for grad in grads:
        directions.append(np.sign(b1 * momentum + (1 - b1) * grad))
        momentum = b2 * momentum + (1 - b2) * grad
    return directions


def sgd_case(momentum: float, *, nesterov: bool) -> tuple:
    rule = SGD(learning_rate=0.1, momentum=momentum, nesterov=nesterov)
    return rule, functools.partial(sgd, momentum=momentum, nesterov=nesterov and momentum > 0), 0.0


@pytest.mark.parametrize(
    ("rule", "oracle", "weight_decay"),
    [
        sgd_case(0.0, nesterov=True),
        sgd_case(0.9, nesterov=False),
        sgd_case(0.9, nesterov=True),
        (RMSprop(learning_rate=0.1, **RMSPROP), functools.partial(rmsprop, **RMSPROP), 0.0),
        (Adam(learning_rate=0.1, **ADAM), functools.partial(adam, **ADAM), 0.0),
        (AdamW(learning_rate=0.1, weight_decay=0.5, **ADAM), functools.partial(adam, **ADAM), 0.5),
        (Lion(learning_rate=0.1, b1=0.5, b2=0.9, weight_decay=0.5), functools.partial(lion, b1=0.5, b2=0.9), 0.5),
    ],
    ids=["nesterov without momentum", "momentum", "nesterov", "rmsprop", "adam", "adamw", "lion"],
)
def test_every_step_equals_numpy_and_only_kernels_decay(
    rule: Optimizer, oracle: Callable[[np.ndarray], list[np.ndarray]], weight_decay: float
) -> None:
    trail = run(rule)
    for name, decay in (("kernel", weight_decay), ("bias", 0.0)):
        directions = oracle(np.stack([grad[name] for grad in GRADS]).astype(np.float64))
        expected = np.asarray(PARAMS[name], np.float64)
        for rate, direction, params in zip(RATES, directions, trail[1:], strict=True):
            expected = expected - rate * (direction + decay * expected)
            np.testing.assert_allclose(params[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_muon_orthogonalizes_kernels_as_matrices_of_all_inputs_by_outputs() -> None:
    shapes = {"kernel": (3, 3, 2, 6), "last": {"kernel": (12, 40)}, "bias": (2, 6)}
    params = jax.jit(lambda: jax.tree.map(jnp.ones, shapes, is_leaf=lambda node: isinstance(node, tuple)))()
    rng = np.random.default_rng(0)
    grads = [jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params) for _ in range(3)]
    rule = Muon(learning_rate=0.1, adam_learning_rate=0.01, beta=0.9, weight_decay=0.5)
    trail = run(rule, grads, params, schedule=Constant(warmup_fraction=0.0))
    numbers = contrib.MuonDimensionNumbers
    axes = {"kernel": numbers((0, 1, 2), 3), "last": {"kernel": numbers()}, "bias": None}
    theirs = contrib.muon(0.1, beta=0.9, weight_decay=0.5, adam_learning_rate=0.01, muon_weight_dimension_numbers=axes)

    @jax.jit
    def step(grad: dict, state: Any, params: dict) -> tuple[dict, Any]:
        updates, state = theirs.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(theirs.init)(params)
    for grad, result in zip(grads, trail[1:], strict=True):
        with jax.numpy_dtype_promotion("standard"):
            params, state = step(grad, state, params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), result, params)


SHAPES = {  # parameters of layers, and the shapes of the matrix and the vector that they are
    "dense": ({"kernel": (6, 4), "bias": (1, 4)}, (6, 4)),
    "query": ({"kernel": (6, 2, 3), "bias": (2, 3)}, (6, 6)),
    "out": ({"kernel": (2, 3, 4), "bias": (4,)}, (6, 4)),
    "convolution": ({"kernel": (3, 3, 2, 5), "bias": (5,)}, (18, 5)),
}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_any_shape_of_weights_and_biases_is_treated_as_a_matrix_and_a_vector(kind: str) -> None:
    """Both sides are drawn alike; updates are equal, and so do only weights decay and are orthogonalized."""

    def drawn(seed: int) -> tuple[dict, dict]:
        rng, shaped, plain = np.random.default_rng(seed), {}, {}
        for layer, (shapes, matrix) in SHAPES.items():
            values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
            shaped[layer] = values
            plain[layer] = {"kernel": values["kernel"].reshape(matrix), "bias": values["bias"].ravel()}
        return shaped, plain

    (shaped, plain), *grads = (drawn(seed) for seed in range(3))
    rule = dataclasses.replace(OPTIMIZERS[kind], learning_rate=0.1, weight_decay=0.5)
    results, expected = (
        run(rule, [pair[side] for pair in grads], params)[-1] for side, params in ((0, shaped), (1, plain))
    )
    for result, item in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.ravel(result), np.ravel(item), rtol=1e-4, atol=1e-6)


def test_parameters_of_other_names_are_no_weights() -> None:
    names = ("scale", "position", "b1", "1", "width")
    rule = dataclasses.replace(OPTIMIZERS["adamw"], weight_decay=0.5)
    params = {
        name: np.ones((2, 3), np.float32)
        for name in (*names, "kernel", "layers.0.weight", "embedding", "weight_hh", "W1")
    }
    trail = run(rule, [jax.tree.map(np.zeros_like, params)], params, schedule=Constant(warmup_fraction=0.0))
    assert {name for name, leaf in trail[1].items() if np.all(np.asarray(leaf) == 1)} == {*names}


@pytest.mark.parametrize("shape", [(), (784, 256)])
def test_the_squared_norm_is_that_of_all_leaves_in_float64(shape: tuple[int, ...]) -> None:
    leaves = [np.random.default_rng(seed).normal(seed, 1, size=shape).astype(np.float32) for seed in (0, 1)]
    result = jax.jit(squared_norm)({"kernel": jnp.asarray(leaves[0]), "bias": jnp.asarray(leaves[1])})
    assert result.dtype == jnp.float32
    assert float(result) == pytest.approx(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves), rel=1e-6)


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.5, 0.5), (1e9, None), (None, None)])
def test_clipping_bounds_the_norm_and_keeps_the_direction(clip_norm: float | None, expected: float | None) -> None:
    rule = SGD(learning_rate=0.1, momentum=0.0, nesterov=False)
    trail = run(rule, GRADS[:1], clip_norm=clip_norm)
    norm = float(np.linalg.norm(DRAWN[0]))
    assert norm > 0.5
    for name, initial in PARAMS.items():
        moved = -0.1 * GRADS[0][name] * ((expected or norm) / norm)
        np.testing.assert_allclose(np.asarray(trail[1][name]) - initial, moved, rtol=1e-4, atol=1e-6)
