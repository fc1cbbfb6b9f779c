"""Networks as two functions, in raw pytrees, Linen and Equinox: trained, differentiated per example, and exported."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import random_params
from factories import (
    OPTIMIZERS,
    ROOT,
    SCHEDULES,
    model_config,
    new_compiler,
    random_split,
)
from gradient_oracles import per_example_grads, per_example_norm

from gradtrail.core import batching
from gradtrail.core.export import export_forward, forward, tensors
from gradtrail.core.gradients import scores
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model
from gradtrail.core.nn.own import Own
from gradtrail.core.train.optimizers import make_optimizer

NETWORKS = {"raw": {"hidden": (5, 5)}, "linen": {"hidden": (5, 5)}, "equinox": {"width": 5, "depth": 2}}
SPLIT = random_split(13)
IMAGES, LABELS = jnp.asarray(SPLIT.images), jnp.asarray(SPLIT.labels)
LOSS = CrossEntropy(label_smoothing=0.2)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Own:
    monkeypatch.chdir(ROOT)
    return Own(file=request.param, config=Own.config_class(request.param)(**NETWORKS[request.param]))


def test_logits_are_those_of_the_same_perceptron(network: Own) -> None:
    model = Model(model_config(network))
    params = random_params(model, 0)
    perceptron = Model(model_config(MLP(hidden=(5, 5), activation="relu", dropout=0.0)))
    expected = jax.jit(perceptron.apply)(of_perceptron(network, params), IMAGES)
    np.testing.assert_allclose(jax.jit(model.apply)(params, IMAGES), expected, rtol=1e-5, atol=1e-6)


def of_perceptron(network: Own, params: Any) -> dict:
    """The parameters of the project's perceptron that are those of a network."""
    leaves = jax.tree.leaves(params)
    kernels = [leaf.T if network.file == "equinox" else leaf for leaf in leaves[1::2]]
    layers = [{"bias": bias.ravel(), "kernel": kernel} for bias, kernel in zip(leaves[::2], kernels, strict=True)]
    return {"layers": dict(enumerate(layers))}


@pytest.mark.parametrize("network", ["equinox"], indirect=True)
def test_updates_of_muon_are_those_of_the_same_perceptron(network: Own) -> None:
    optimizer = make_optimizer(OPTIMIZERS["muon"], SCHEDULES["constant"], None, 1)
    params, grads = (random_params(Model(model_config(network)), seed) for seed in (0, 1))

    @jax.jit
    def updated(params: Any, grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)[0]

    result = of_perceptron(network, updated(params, grads))
    expected = updated(of_perceptron(network, params), of_perceptron(network, grads))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), result, expected)


@pytest.mark.parametrize("network", ["equinox"], indirect=True)
def test_per_example_norms_are_those_of_vmap_grad(network: Own) -> None:
    model = Model(model_config(network))
    params = random_params(model, 0)
    score = scores.compile_score(model, LOSS, 5, compiler=new_compiler())
    call = functools.partial(score, params)
    result = batching.join(list(batching.map_batches(call, 5, SPLIT.images, SPLIT.labels)))
    grads = per_example_grads(model, params, IMAGES, LABELS, loss=LOSS)
    np.testing.assert_allclose(result["grad_norm"], per_example_norm(grads), rtol=1e-4)


def test_export_equals_the_jitted_network(network: Own) -> None:
    model = Model(model_config(network))
    by_name = tensors([random_params(model, 0)], 0.7)
    exported = jax.jit(export_forward(model, by_name, 1, "cpu").call)
    np.testing.assert_array_equal(exported(by_name, SPLIT.images), jax.jit(forward(model, 1))(by_name, SPLIT.images))
