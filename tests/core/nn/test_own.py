"""Networks of one's own: what a file may hold, and per-example gradients against `vmap(grad)`."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import ROOT, cases, params_on_device, train_config
from gradient_oracles import per_example_grads, per_example_norm

from gradtrail.core import per_example
from gradtrail.core.config import ConfigError
from gradtrail.core.nn import losses
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.losses import CROSS_ENTROPY, CrossEntropy
from gradtrail.core.nn.models import Model, by_path
from gradtrail.core.nn.own import Own
from gradtrail.core.per_example import Clipping

HEADER = """
import math
import jax
import jax.numpy as jnp
from flax import nnx
from gradtrail.core.config import Count, Share, config
from gradtrail.core.nn.layers import Dense, dropout
from gradtrail.core.nn.own import OtherLayer
"""
RAW = """
class Raw:
    def __init__(self, *widths):
        self.widths = widths
    def init(self, key):
        keys, pairs = jax.random.split(key, 2), zip(self.widths, self.widths[1:])
        return {"layers": [{"kernel": jax.random.normal(key, pair)} for key, pair in zip(keys, pairs)]}
    def apply(self, params, images):
        hidden = jnp.tanh(images.reshape(len(images), -1) @ params["layers"][0]["kernel"])
        return hidden @ params["layers"][1]["kernel"]

@config
class Network:
    width: Count
    def build(self, shape, num_classes, *, rngs):
        return Raw(math.prod(shape), self.width, num_classes)
"""
MIXED = """
@config
class Network:
    width: Count
    dropout: Share
    def build(self, shape, num_classes, *, precision, rngs):
        return Module(self, math.prod(shape), num_classes, precision, rngs)

class Module(nnx.Module):
    def __init__(self, config, num_inputs, num_classes, precision, rngs):
        self.first = Dense(num_inputs, config.width, precision, rngs=rngs)
        self.norm = OtherLayer(nnx.LayerNorm(config.width, rngs=rngs))
        self.last = Dense(config.width, num_classes, precision, rngs=rngs)
        self.dropout = config.dropout
    def __call__(self, images, key, tap):
        hidden = tap(self.norm, tap(self.first, images.reshape(len(images), -1)))
        return tap(self.last, dropout(jnp.tanh(hidden), self.dropout, key))
"""
SIMPLE = """
@config
class Network:
    width: Count
    dropout: Share = 0.0
    def build(self, shape, num_classes, *, rngs):
        return Module(self, math.prod(shape), num_classes, rngs)

class Module(nnx.Module):
    def __init__(self, config, num_inputs, num_classes, rngs):
        self.first = nnx.Linear(num_inputs, config.width, rngs=rngs)
        self.last = nnx.Linear(config.width, num_classes, rngs=rngs)
        self.dropout = config.dropout
    def __call__(self, images, key=None):
        hidden = nnx.relu(self.first(images.reshape(len(images), -1)))
        return self.last(dropout(hidden, self.dropout, key))
"""
FILES = {"raw": (RAW, {"width": 4}), "mixed": (MIXED, {"width": 4, "dropout": 0.0}), "simple": (SIMPLE, {"width": 4})}
MakeModel = Callable[..., Model]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModel]:
    """Make the model of the text of a file, with JAX's promotion of dtypes, which Flax's own modules need."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pipeline/networks"
    folder.mkdir(parents=True)
    (folder / "transformer.py").write_text((ROOT / "pipeline/networks/transformer.py").read_text())

    def make(text: str, shape: tuple[int, ...] = (4, 3), precision: Precision = "float32", **fields: Any) -> Model:
        name = text if text == "transformer" else "mine"
        if text != name:
            (folder / "mine.py").write_text(HEADER + textwrap.dedent(text))
        network = Own(file=name, config=Own.config_class(name)(**fields))
        config = train_config(model="mlp").model_config((4, 3), 3)
        return Model(dataclasses.replace(config, network=network, precision=precision, image_shape=shape))

    with jax.numpy_dtype_promotion("standard"):
        yield make


CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "transformer": ("transformer", (4, 6), {"patch": 2, "width": 4, "heads": 2, "blocks": 1}),
    **{name: (text, (4, 3), fields) for name, (text, fields) in FILES.items()},
}


@pytest.mark.parametrize(
    ("name", "precision"),
    cases(
        [("transformer", "float32"), ("raw", "float32"), ("mixed", "bfloat16"), ("simple", "float32")],
        fast=[("raw", "float32"), ("mixed", "bfloat16")],
    ),
)
def test_per_example_gradients_are_those_of_vmap_grad(make: MakeModel, name: str, precision: Precision) -> None:
    text, shape, fields = CASES[name]
    model = make(text, shape, precision, **fields)
    params = params_on_device(model)
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (5, *shape), dtype=np.uint8))
    labels = jnp.asarray(rng.integers(0, 3, 5, dtype=np.int32))
    clipping = Clipping(norm=0.3, copies=1, loss=CrossEntropy(label_smoothing=0.1))

    @jax.jit
    def computed(params: Any) -> Any:
        squares, _ = per_example.squared_grad_norms(
            model, params, images, labels, loss=CrossEntropy(label_smoothing=0.1)
        )
        direction = jax.tree.map(lambda leaf: leaf[None], params)
        dots = per_example.grad_dots(model, params, images, labels, direction, loss=CrossEntropy(label_smoothing=0.1))
        clipped = per_example.clipped_grad_sum(model, params, images, labels, jnp.ones(5, bool), clipping)[0]
        exact = per_example_grads(model, params, images, labels, loss=CrossEntropy(label_smoothing=0.1))
        return squares, dots, clipped, exact

    squares, dots, clipped, exact = computed(params)
    tolerance = 1e-4 if precision == "float32" else 0.02
    rows = np.concatenate([np.asarray(leaf).reshape(5, -1) for leaf in jax.tree.leaves(exact)], axis=1)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])
    np.testing.assert_allclose(np.sqrt(sum(squares.values())), per_example_norm(exact), rtol=tolerance)
    np.testing.assert_allclose(dots[:, 0], rows @ flat, atol=tolerance * np.max(np.linalg.norm(rows, axis=1)) * 10)
    weights = np.minimum(1, 0.3 / per_example_norm(exact))
    result = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(clipped)])
    np.testing.assert_allclose(result, weights @ rows, atol=tolerance * np.max(np.abs(rows)))


@pytest.mark.parametrize("shape", [(8, 6), (8, 6, 3)])
def test_transformer_takes_gray_and_color(make: MakeModel, shape: tuple[int, ...]) -> None:
    model = make("transformer", shape, patch=2, width=4, heads=2, blocks=1)
    images = jax.ShapeDtypeStruct((2, *shape), jnp.uint8)
    assert jax.eval_shape(model.apply, model.abstract_params(), images).shape == (2, 3)


def test_layers_of_the_project_are_fast_and_others_are_named(make: MakeModel) -> None:
    assert per_example.unknown_layers(make(MIXED, width=4, dropout=0.0)) == ["norm (LayerNorm)"]
    assert per_example.unknown_layers(make(SIMPLE, width=4)) == ["network (Linear)"]
    assert per_example.unknown_layers(make(RAW, width=4)) == ["network (functions)"]
    fast = (
        "class Fast(OtherLayer):\n    def squared_grad_norms(self, inputs, cotangent):\n        return inputs[:, 0]\n"
    )
    text = MIXED.replace("= OtherLayer(", "= Fast(")
    assert per_example.unknown_layers(make(fast + text, width=4, dropout=0.0)) == []


def test_an_attribute_of_a_module_may_have_any_name(make: MakeModel) -> None:
    model = make(MIXED.replace("self.last", "self.remat"), width=4, dropout=0.0)
    assert {"remat/bias", "remat/kernel"} < by_path(model.abstract_params()).keys()


def test_dropout_draws_from_the_key_of_each_example(make: MakeModel) -> None:
    model = make(SIMPLE, width=400, dropout=0.5)
    params, images = params_on_device(model), jnp.asarray(np.full((3, 4, 3), 0.5, np.float32))
    draw = jax.jit(lambda key: model.apply(params, images, key=jax.random.split(key, 2)[np.array([0, 1, 0])]))
    logits = np.asarray(draw(jax.random.key(1)))
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.allclose(logits[0], logits[1])


def test_private_training_has_the_dropout_of_each_example(make: MakeModel) -> None:
    """A module without `tap` is one layer, which gets an example and its key."""
    model = make(SIMPLE, width=40, dropout=0.5)
    params, labels = params_on_device(model), jnp.array([0, 2, 1], jnp.int32)
    images = jnp.asarray(np.random.default_rng(0).random((3, 4, 3), np.float32))
    keys = jax.random.split(jax.random.key(1), 3)

    def loss(params: Any, *example: jax.Array) -> jax.Array:
        image, label, key = (leaf[None] for leaf in example)
        return losses.cross_entropy(model.apply(params, image, key=key), label)[0]

    @jax.jit
    def computed(params: Any) -> Any:
        clipping = Clipping(norm=1e3, copies=1, loss=CROSS_ENTROPY)
        clipped = per_example.clipped_grad_sum(model, params, images, labels, jnp.ones(3, bool), clipping, key=keys)
        return clipped[:2], jax.vmap(jax.grad(loss), (None, 0, 0, 0))(params, images, labels, keys)

    (total, norms), grads = computed(params)
    np.testing.assert_allclose(norms, per_example_norm(grads), rtol=1e-5)
    for result, rows in zip(jax.tree.leaves(total), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(result, np.sum(rows, axis=0), atol=1e-5 * np.max(np.abs(rows)))


def test_an_image_that_overflows_adds_a_finite_gradient_of_bounded_norm(make: MakeModel) -> None:
    text = SIMPLE.replace("nnx.relu(", "jnp.exp(1e3 * ")
    model = make(text, width=4)
    params, clipping = params_on_device(model), Clipping(norm=0.3, copies=1, loss=CROSS_ENTROPY)
    images = jnp.asarray(np.repeat(np.float32([0, 1]), 12).reshape(2, 4, 3))
    labels, mask = jnp.asarray(np.zeros(2, np.int32)), jnp.asarray(np.ones(2, bool))
    sums = jax.jit(lambda params: per_example.clipped_grad_sum(model, params, images, labels, mask, clipping))
    total, _, _ = sums(params)
    assert np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(total))) <= 0.6


LAST = "        self.last = nnx.Linear(config.width, num_classes, rngs=rngs)"
REFUSED = {
    "fails to import": ("raise KeyError('x')", r"^pipeline/networks/mine.py:\d+: import fails: KeyError: 'x'$"),
    "no Python": ("def f(:", r"^pipeline/networks/mine.py:\d+: import fails: SyntaxError: "),
    "no Network": ("x = 1", r"^pipeline/networks/mine.py: has no class Network with @config"),
    "batch statistics": (
        SIMPLE.replace(LAST, f"{LAST}\n        self.norm = nnx.BatchNorm(4, rngs=rngs)"),
        r"^pipeline/networks/mine.py: the module keeps batch statistics, .* use nnx.GroupNorm or nnx.LayerNorm",
    ),
    "random state": (
        SIMPLE.replace(LAST, f"{LAST}\n        self.drop = nnx.Dropout(0.5, rngs=rngs)"),
        r"keeps the state of a random generator, as nnx.Dropout does: take `key`",
    ),
    "other state": (
        SIMPLE.replace(LAST, f"{LAST}\n        self.count = nnx.Variable(jnp.zeros(2))"),
        r"must keep nnx.Param alone, got Variable",
    ),
    "other dtype": (
        SIMPLE.replace("config.width, rngs=", "config.width, param_dtype=jnp.bfloat16, rngs="),
        r"parameters must be float32, got bfloat16",
    ),
    "wrong number of classes": (
        SIMPLE.replace("config.width, num_classes", "config.width, 7"),
        r"logits must be float32 of shape \(2, 3\) for images of shape \(2, 4, 3\), got float32 of shape \(2, 7\)$",
    ),
    "fails on images": (
        SIMPLE.replace("len(images), -1", "len(images), 5"),
        r"^pipeline/networks/mine.py:\d+: the network on images of shape \(2, 4, 3\) fails: TypeError: ",
    ),
    "fails to build": (
        SIMPLE.replace("nnx.Linear(num_inputs", "nnx.Linear(missing"),
        r"^pipeline/networks/mine.py:\d+: build fails: NameError: name 'missing'",
    ),
    "key without dropout": (
        SIMPLE.replace("dropout: Share = 0.0", "").replace("config.dropout", "0.0"),
        r"takes `key`, so Network needs a field `dropout`",
    ),
    "layer without tap": (
        MIXED.replace("tap(self.norm, tap(self.first, images.reshape(len(images), -1)))", "self.first(images[:, 0])"),
        r"the network on images of shape|must call each Layer once through `tap`, got last$",
    ),
    "layer called twice": (
        MIXED.replace("tap(self.norm, tap(", "tap(self.norm, tap(self.norm, tap(").replace("-1)))", "-1))))"),
        r"must call each Layer once through `tap`, got first, last, norm, norm$",
    ),
    "two layers with one parameter": (
        MIXED.replace("        self.dropout", "        self.norm.module.bias = self.first.bias\n        self.dropout"),
        r"the parameter norm/module/bias belongs to two layers; wrap both modules as one: gradtrail",
    ),
    "parameter outside of layers": (
        MIXED.replace("        self.dropout", "        self.scale = nnx.Param(jnp.ones(3))\n        self.dropout"),
        r"the parameter scale belongs to no Layer; wrap its module: gradtrail.core.nn.own.OtherLayer\(module\)$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_file_is_refused_in_one_line(make: MakeModel, name: str) -> None:
    text, message = REFUSED[name]
    fields = {"width": 4, "dropout": 0.0} if "dropout: Share" in text else {"width": 4}
    with pytest.raises(ConfigError, match=message) as caught:
        make(text, **fields)
    assert "\n" not in str(caught.value)
