"""A network of one's own is refused unless each image has a gradient of its own, and the layers compute it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import ROOT, train_config
from gradient_oracles import per_example_grads
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from gradtrail.core.config import ConfigError
from gradtrail.core.gradient_check import check_gradients
from gradtrail.core.nn import losses
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.models import Model
from gradtrail.core.nn.own import Own

FILE = """
import math
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gradtrail.core.config import Count, Share, config
from gradtrail.core.nn.layers import Dense, dropout
from gradtrail.core.nn.own import OtherLayer

@config
class Network:
    dropout: Share = 0.0
    operations: tuple[str, ...] = ()
    gated: str = "nothing"
    def build(self, shape, num_classes, *, precision, rngs):
        return Module(self, math.prod(shape), num_classes, precision, rngs)

def operate(name, h):
    count = float(len(h))
    match name:
        case "nothing": return h
        case "tanh": return jnp.tanh(h)
        case "center features": return h - jnp.mean(h, axis=1, keepdims=True)
        case "sum of earlier": return jnp.cumsum(h, axis=0)
        case "less the one before": return h - jnp.pad(h, ((1, 0), (0, 0)))[:-1]
        case "next": return jnp.roll(h, -1, axis=0)
        case "last": return jnp.roll(h, 1, axis=0)
        case "mean": return h + jnp.mean(h, axis=0, keepdims=True)
        case "sorted": return jnp.sort(h, axis=0)
        case "place": return h + jnp.arange(count, dtype=h.dtype)[:, None]
        case "share": return h / count
        case "times": return h * count

def drawn():
    return float(np.random.default_rng().random())

class Own(Dense):
    pass

class Module(nnx.Module):
    def __init__(self, config, num_inputs, num_classes, precision, rngs):
        self.config = config
        self.first = Dense(num_inputs, 4, precision, rngs=rngs)
        self.gate = Dense(4, 4, precision, rngs=rngs)
        self.gate.kernel[...] = jnp.zeros((4, 4))
        self.last = Own(4, num_classes, precision, rngs=rngs)
        # init
    def __call__(self, images, key, tap):
        h = tap(self.first, images.reshape(len(images), -1))
        for name in self.config.operations:
            h = operate(name, h)
        h = h + tap(self.gate, operate(self.config.gated, h) - h)
        h = dropout(jnp.tanh(h), self.config.dropout, key)
        return tap(self.last, h)
"""
CALL, INIT = "        return tap(self.last, h)", "        # init"
MakeModel = Callable[..., Model]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeModel]:
    """Make the model of the file above with some texts replaced."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pipeline/networks").mkdir(parents=True)

    def make(*replaced: tuple[str, str], precision: Precision = "float32", **fields: Any) -> Model:
        text = FILE
        for before, after in replaced:
            assert before in text
            text = text.replace(before, after)
        (folder / "pipeline/networks/mine.py").write_text(text)
        network = Own(file="mine", config=Own.config_class("mine")(**fields))
        return Model(
            dataclasses.replace(train_config(model="mlp").model_config((4, 3), 3), network=network, precision=precision)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield make


def is_accepted(model: Model, **options: Any) -> bool:
    try:
        check_gradients(model, **options)
    except ConfigError:
        return False
    return True


@functools.partial(jax.jit, static_argnums=0)
def largest_error(model: Model, params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The largest error of an image's gradient in a batch of several sizes, relative to that of a batch of one."""
    alone = per_example_grads(model, params, images, labels, loss=CROSS_ENTROPY)
    expected = jax.vmap(lambda tree: ravel_pytree(tree)[0])(alone)

    def grads(rows: jax.Array) -> jax.Array:
        def example_losses(params: Any) -> jax.Array:
            return losses.cross_entropy(model.apply(params, images[rows]), labels[rows])

        return jax.vmap(lambda tree: ravel_pytree(tree)[0])(jax.jacrev(example_losses)(params))

    orders = [jnp.array(order) for order in ((0,), (1, 0), (2, 0, 1), (4, 3, 2, 1, 0))]
    errors = [jnp.max(jnp.linalg.norm(grads(rows) - expected[rows], axis=1)) for rows in orders]
    return jnp.max(jnp.stack(errors)) / jnp.max(jnp.linalg.norm(expected, axis=1))


HARMLESS = st.sampled_from(
    [
        *(("tanh",), ("center features",), ("sum of earlier", "less the one before"), ("next", "last")),
        *(("share", "times"), ("place", "center features")),
    ]
)
OTHERS = ("sum of earlier", "less the one before", "next", "last", "mean", "sorted", "place", "share", "times")
ANY = st.one_of(HARMLESS, st.sampled_from([(name,) for name in OTHERS]))


@pytest.mark.slow  # every network is compiled
@settings(max_examples=6)
@given(st.one_of(st.lists(HARMLESS, max_size=3), st.lists(ANY, max_size=3)), st.sampled_from(("nothing", *OTHERS)))
def test_network_is_accepted_if_images_have_the_gradients_that_they_have_alone(
    make: MakeModel, operations: list[tuple[str, ...]], gated: str
) -> None:
    """Operations that undo each other are no dependence; one behind a gate of zeros is."""
    model = make(operations=tuple(itertools.chain(*operations)), gated=gated)
    rng = np.random.default_rng(1)
    examples = jnp.asarray(rng.random((5, 4, 3), np.float32)), jnp.asarray(rng.integers(0, 3, 5, dtype=np.int32))
    initial = jax.jit(model.init)(key=jax.random.key(0))
    noisy = jax.tree.map(lambda leaf: leaf + 0.3 * rng.standard_normal(leaf.shape, np.float32), initial)
    error = max(float(largest_error(model, params, *examples)) for params in (initial, noisy))
    assert is_accepted(model) == (error < 1e-3), error


DEPENDS = r"mine.py: the logits of an image depend on the {}, so there are no per-example gradients; compute each image"
OTHER_IMAGES = DEPENDS.format("other images of its batch")
TWO_NETWORKS = r"mine.py: two networks of one key differ; draw random numbers by JAX, from `rngs` or `key`$"
NOT_TAPPED = (
    r"mine.py: a part of the gradient of {} does not come from a call through `tap`; call its layer once, .*OtherLayer"
)
METHOD = r"mine.py: Own.{} of the layer last does not agree with the gradients of single images$"
REFUSED: dict[str, tuple[list[tuple[str, str]], dict[str, Any], str]] = {
    "other images": ([], {"operations": ("sum of earlier",)}, OTHER_IMAGES),
    "place": ([], {"operations": ("place",)}, DEPENDS.format("its place in the batch").replace("the its", "its")),
    "size": ([], {"operations": ("share",)}, DEPENDS.format("size of the batch")),
    "key of another image": (
        [(", key)", ", None if key is None else jnp.broadcast_to(key[:1], key.shape))")],
        {"dropout": 0.5},
        OTHER_IMAGES,
    ),
    "gate of zeros": (
        [],
        {"gated": "mean"},
        r"mine.py: the gradient of gate/bias|kernel by an image is another in a batch",
    ),
    "NaN": (
        [(CALL, f"        h = h * jnp.nan\n{CALL}")],
        {},
        r"mine.py: the logits are NaN or infinite for random images$",
    ),
    "NaN gradient": (
        [(CALL, f"        h = h + jnp.sqrt(0 * h)\n{CALL}")],
        {},
        r"mine.py: the gradient of first/bias is NaN or infinite for random images$",
    ),
    "NumPy draws weights": ([(INIT, "        self.first.bias[...] = jnp.full(4, drawn())")], {}, TWO_NETWORKS),
    "NumPy draws in a call": ([("tanh(h)", "tanh(drawn() * h)")], {}, TWO_NETWORKS),
    "weights used twice": (
        [(CALL, f"        h = h @ self.gate.kernel[...]\n{CALL}".replace("gate", "first").replace("[...]", "[:4]"))],
        {},
        NOT_TAPPED.format("first/kernel"),
    ),
    "layer called directly too": (
        [("tap(self.last, h)", "tap(self.last, h) + self.last(h)")],
        {},
        NOT_TAPPED.format("last/bias"),
    ),
    "norms": (
        [("    pass", "    def squared_grad_norms(self, *a):\n        return 1.1 * super().squared_grad_norms(*a)")],
        {},
        METHOD.format("squared_grad_norms"),
    ),
    "bound of norms": (
        [
            (
                "    pass",
                "    def clip_terms(self, x, y, n):\n        return super().clip_terms(x, y, 1)[0][::n], (x, y)",
            )
        ],
        {},
        METHOD.format("clip_terms of 2 copies"),
    ),
    "clipped sums": (
        [("    pass", "    def weighted_grad(self, terms, w):\n        return super().weighted_grad(terms, w**2)")],
        {},
        METHOD.format("weighted_grad of 1 copies"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_what_differs_in_one_line(make: MakeModel, name: str) -> None:
    replaced, fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        check_gradients(make(*replaced, **fields))
    assert "\n" not in str(caught.value)


def test_size_of_the_batches_of_a_training_is_tried(make: MakeModel) -> None:
    model = make((CALL, f"        h = jnp.cumsum(h, axis=0) if len(h) == 16 else h\n{CALL}"))
    assert not is_accepted(model, batch_size=16)


def test_disable_jit_and_random_weights_that_give_nan_refuse_nothing(make: MakeModel) -> None:
    gate = "h + tap(self.gate, operate(self.config.gated, h) - h)"
    with jax.disable_jit():
        check_gradients(make((gate, "h * jnp.sqrt(0.01 + tap(self.gate, h))")))


FAST = """class Own(Dense):
    def squared_grad_norms(self, inputs, cotangent):
        return (1 + jnp.sum(inputs**2, axis=1)) * jnp.sum(cotangent**2, axis=1)
"""


def test_networks_with_exact_gradients_are_accepted(make: MakeModel) -> None:
    """Also if operations on the batch undo each other."""
    undone = ("sum of earlier", "less the one before", "next", "last", "share", "times", "place", "center features")
    own = make(("class Own(Dense):\n    pass\n", FAST), operations=undone, precision="bfloat16", dropout=0.5)
    check_gradients(own, batch_size=5)


@pytest.mark.slow
def test_transformer_is_accepted(make: MakeModel) -> None:
    with jax.numpy_dtype_promotion("standard"):
        path = Path("pipeline/networks/transformer.py")
        path.write_text((ROOT / path).read_text())
        network = Own(file="transformer", config=Own.config_class("transformer")(patch=2, width=4, heads=2, blocks=1))
        config = train_config(model="mlp").model_config((6, 4), 3)
        check_gradients(Model(dataclasses.replace(config, network=network, precision="bfloat16")))
