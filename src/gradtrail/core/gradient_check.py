"""A check of a network of one's own on random images: has each image a gradient of its own, and is it computed right?

By definition it is the gradient of the loss of a batch of that image alone. In every other batch the image must have
the same logits and the same gradient, and what the methods of layers compute (`nn.layers.Layer`) must follow from it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.stages import Lowered
from jaxtyping import Array, Float, Int, Key, PyTree

from gradtrail.core.config import ConfigError
from gradtrail.core.nn import losses
from gradtrail.core.nn.layers import Layer
from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.models import Model, Params, by_path
from gradtrail.core.nn.own import WRAPPER, Own, WholeNetwork, faults
from gradtrail.core.per_example import forward_of, layer_metrics

Places: TypeAlias = Mapping[int, Int[np.ndarray, "batches size"]]  # size of batches → number of the image at each place
Errors: TypeAlias = dict[str, Float[Array, ""]]  # relative errors by method

_NUM_IMAGES = 4
_NUM_BATCHES = 5  # of each size; more than there are images, so that every place has some image twice
_SMALL, _ODD = 2, 7  # sizes of batches, beside those of one image
_LARGEST_BATCH = 2**21  # values in the images of a batch
_LOGITS_ERROR = 1e-4  # relative error of logits by rounding
_GRADS_ERROR = 2e-2  # relative error of gradients by rounding, which may move the input of a ReLU across 0
_METHODS_ERROR = 1e-3  # the same from equal inputs and cotangents, where nothing moves
_FLOOR = 5e-3  # share of the whole gradient to which the error of a small part is relative
_QUICKLY = {"xla_backend_optimization_level": 0}  # a program runs once or twice
_NOT_FINITE = "NaN or infinite for random images"
_REMEDY = "so there are no per-example gradients; compute each image by itself, as jax.vmap does"


def check_gradients(model: Model, *, batch_size: int = 1) -> None:
    """Raise ConfigError, one line, unless a network of one's own has exact per-example gradients.

    Tested in float32 at the initial parameters and at random ones, since a zero may hide a dependence. Networks that
    are not one's own are not tested here.

    Args:
        batch_size: size of batches to test beside small ones, unless their images are too large.
    """
    network, shape = model.config.network, model.config.image_shape
    if not isinstance(network, Own):
        return
    rng, limit = np.random.default_rng(0), max(_ODD, _LARGEST_BATCH // math.prod(shape))
    sizes = {_SMALL, _ODD, min(batch_size, limit)}
    places = {size: rng.integers(0, _NUM_IMAGES, (_NUM_BATCHES, size)) for size in sorted(sizes)}
    places[1] = np.arange(_NUM_IMAGES)[:, None]
    images = rng.random((_NUM_IMAGES, *shape), np.float32)
    labels = rng.integers(0, model.config.num_classes, _NUM_IMAGES, dtype=np.int32)
    weights = rng.uniform(0.5, 1.5, (_NUM_BATCHES, _ODD)).astype(np.float32)  # of the losses in batches
    keys = jax.random.split(jax.random.key(1), _NUM_IMAGES) if network.dropout else None
    config = dataclasses.replace(model.config, precision="float32")
    with (
        faults(network.path, "the network on random images"),
        jax.default_matmul_precision("highest"),
        jax.disable_jit(False),  # a debug switch of a training is for its own steps
    ):
        exact, again = model if model.config == config else Model(config), Model(config)
        init, apply = _lowered(exact, images, keys)
        if [init.as_text(), apply.as_text()] != [program.as_text() for program in _lowered(again, images, keys)]:
            raise ConfigError(
                f"{network.path}: two networks of one key differ; draw random numbers by JAX, from `rngs` or `key`"
            )
        measure = jax.jit(functools.partial(_measure, exact, places), compiler_options=_QUICKLY)
        measure_layers = jax.jit(functools.partial(_measure_layers, exact), compiler_options=_QUICKLY)
        initial = jax.device_get(init.compile()(key=jax.random.key(0)))
        noisy = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32), initial)
        for params in (initial, noisy):
            results = measure(params, images, labels, keys, weights)
            logits, alone, summed = jax.device_get((results[0], *map(by_path, results[1:])))
            fault = _dependence(places, logits) or _wrong_sum(alone, summed, places[_ODD], weights)
            if fault is None:
                layers = measure_layers(params, images, labels, keys, results[2])
                fault = _wrong_layer(alone, *jax.device_get(layers))
            if fault and not (params is noisy and fault.endswith(_NOT_FINITE)):  # no training begins there
                raise ConfigError(f"{network.path}: {fault}")


def _lowered(model: Model, images: np.ndarray, keys: Key[Array, " images"] | None) -> tuple[Lowered, Lowered]:
    """Return the programs of the initialization and of the network; numbers that Python drew are constants in them."""
    init = jax.jit(model.init, compiler_options=_QUICKLY).lower(key=jax.random.key(0))
    return init, jax.jit(model.apply).lower(model.abstract_params(), images, key=keys)


def _measure(
    model: Model,
    places: Places,
    params: Params,
    images: Float[Array, "images height width *channels"],
    labels: Int[Array, " images"],
    keys: Key[Array, " images"] | None,
    weights: Float[Array, "batches size"],
) -> tuple[dict[int, Float[Array, "_ _ classes"]], Params, Params]:
    """Return logits by the size of batches, gradients of single images, and the weighted sum of those in batches."""

    def logits_of(params: Params, rows: Array) -> Array:
        return model.apply(params, images[rows], key=None if keys is None else keys[rows])

    def loss(params: Params, rows: Array, weights: Array) -> tuple[Array, Array]:
        logits = logits_of(params, rows)
        return weights @ losses.cross_entropy(logits, labels[rows]), logits

    def sum_of_losses(params: Params) -> tuple[Array, Array]:
        batches, logits = jax.vmap(loss, (None, 0, 0))(params, jnp.asarray(places[_ODD]), weights)
        return jnp.sum(batches), logits

    grad = jax.grad(loss, has_aux=True)
    alone, alone_logits = jax.vmap(lambda rows: grad(params, rows, jnp.ones(1)))(jnp.asarray(places[1]))
    summed, odd_logits = jax.grad(sum_of_losses, has_aux=True)(params)
    sizes = sorted(places.keys() - {1, _ODD})
    logits = {size: jax.lax.map(functools.partial(logits_of, params), places[size]) for size in sizes}
    return logits | {1: alone_logits, _ODD: odd_logits}, alone, summed


def _measure_layers(
    model: Model, params: Params, images: Array, labels: Array, keys: Array | None, direction: Params
) -> tuple[dict[str, Float[Array, "images parameters"]], Errors]:
    """Return by layer the gradients of single images from its inputs and cotangents, and errors of methods.

    Nothing of a network that is one layer, whose gradient is the definition.
    """
    layers = model.layers()
    if any(isinstance(layer, WholeNetwork) for layer in layers.values()):
        return {}, {}
    directions = model.split_by_layer(jax.tree.map(lambda leaf: leaf[None], direction))
    forward = forward_of(model, params, images, labels, CROSS_ENTROPY, keys)
    by_layer, _ = layer_metrics(model, forward, _layer_results, directions)
    methods = Errors()
    for name, (rows, errors, terms) in by_layer.items():
        for copies, term in terms.items():
            weights = jnp.arange(1, 1 + len(rows) // copies, dtype=jnp.float32)
            grad, _ = ravel_pytree(layers[name].weighted_grad(term, weights))
            errors[f"weighted_grad of {copies} copies"] = _error(grad, weights @ _summed(rows, copies))
        kind = type(layers[name]).__name__
        methods |= {f"{kind}.{method} of the layer {name}": error for method, error in errors.items()}
    return {name: rows for name, (rows, _, _) in by_layer.items()}, methods


def _layer_results(
    layer: Layer, direction: PyTree, inputs: Array, cotangent: Array
) -> tuple[Float[Array, "images parameters"], Errors, dict[int, PyTree]]:
    """Return gradients by definition, errors of the methods of a layer, and terms of `weighted_grad` by copies.

    The methods of this project's layers have tests.
    """
    rows = Layer.grads(layer, inputs, cotangent)
    if type(layer).__module__.startswith("gradtrail.core."):
        return rows, {}, {}
    along = jax.vmap(lambda direction: ravel_pytree(direction)[0])(direction)
    errors = {
        "grads": _error(layer.grads(inputs, cotangent), rows),
        "squared_grad_norms": _error(layer.squared_grad_norms(inputs, cotangent), jnp.sum(rows**2, axis=1)),
        "grad_dots": _error(layer.grad_dots(inputs, cotangent, direction), rows @ along.T),
    }
    terms = {}
    for copies in (1, 2):
        bound, terms[copies] = layer.clip_terms(inputs, cotangent, copies)
        squares = jnp.sum(_summed(rows, copies) ** 2, axis=1)
        errors[f"clip_terms of {copies} copies"] = _error(jnp.minimum(bound, squares), squares)
    return rows, errors, terms


def _summed(rows: Float[Array, "rows parameters"], copies: int) -> Float[Array, "examples parameters"]:
    return jnp.sum(rows.reshape(-1, copies, rows.shape[1]), axis=1)


def _error(values: Array, expected: Array) -> Float[Array, ""]:
    """Return the norm of the difference relative to that of `expected`; NaN if it is not finite."""
    return jnp.linalg.norm(values - expected) / (jnp.linalg.norm(expected) + 1e-30)


def _dependence(places: Places, logits: Mapping[int, np.ndarray]) -> str | None:
    """Describe what the logits of an image depend on beside the image; None for nothing."""
    if not all(np.isfinite(values).all() for values in logits.values()):
        return f"the logits are {_NOT_FINITE}"
    images = np.concatenate([rows.ravel() for rows in places.values()])
    sizes = np.concatenate([np.full(rows.size, size) for size, rows in places.items()])
    columns = np.concatenate([np.tile(np.arange(size), len(rows)) for size, rows in places.items()])
    values = np.concatenate([logits[size].reshape(-1, logits[size].shape[-1]) for size in places])
    for cause, same in {
        "the other images of its batch": (images, sizes, columns),
        "its place in the batch": (images, sizes),
        "the size of the batch": (images,),
    }.items():
        _, group = np.unique(np.stack(same), axis=1, return_inverse=True)
        lowest, highest = (np.full((group.max() + 1, values.shape[1]), end, np.float32) for end in (np.inf, -np.inf))
        np.minimum.at(lowest, group, values)
        np.maximum.at(highest, group, values)
        if np.max(highest - lowest) > _LOGITS_ERROR * np.max(np.abs(logits[1])):
            return f"the logits of an image depend on {cause}, {_REMEDY}"
    return None


def _wrong_sum(
    alone: Mapping[str, np.ndarray], summed: Mapping[str, np.ndarray], rows: np.ndarray, weights: np.ndarray
) -> str | None:
    """Describe a gradient that is not finite, or that is another in a batch than alone; None for none."""
    if path := next((path for path, leaf in alone.items() if not np.isfinite(leaf).all()), None):
        return f"the gradient of {path} is {_NOT_FINITE}"
    by_image = np.bincount(rows.ravel(), weights.ravel()).astype(np.float32)
    if path := _differing(summed, {path: np.tensordot(by_image, leaf, 1) for path, leaf in alone.items()}):
        return f"the gradient of {path} by an image is another in a batch than alone, {_REMEDY}"
    return None


def _wrong_layer(
    alone: Mapping[str, np.ndarray], grads: Mapping[str, np.ndarray], methods: Mapping[str, np.ndarray]
) -> str | None:
    """Describe a parameter whose gradient is not that by its layer, or a wrong method of a layer; None for none."""
    expected, values = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, rows in grads.items():
        leaves = {path: leaf.reshape(len(leaf), -1) for path, leaf in alone.items() if path.startswith(f"{name}/")}
        ends = np.cumsum([leaf.shape[1] for leaf in leaves.values()])[:-1]
        expected |= leaves
        values |= dict(zip(leaves, np.split(rows, ends, axis=1), strict=True))
    if path := _differing(values, expected):
        return (
            f"a part of the gradient of {path} does not come from a call through `tap`; call its layer once, through "
            f"`tap`, and use its parameters nowhere else, or wrap all that use them: {WRAPPER}"
        )
    if method := next((method for method, error in methods.items() if not error < _METHODS_ERROR), None):
        return f"{method} does not agree with the gradients of single images"
    return None


def _differing(values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str | None:
    """Return the first parameter whose gradients are not those expected; None for none."""
    norms = {path: np.linalg.norm(leaf) for path, leaf in expected.items()}
    floor = _FLOOR * math.sqrt(sum(norm**2 for norm in norms.values()))
    errors = {path: np.linalg.norm(values[path] - leaf) for path, leaf in expected.items()}
    return next((path for path, error in errors.items() if not error <= _GRADS_ERROR * (norms[path] + floor)), None)
