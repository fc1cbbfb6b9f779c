"""Optimizers of Optax: from gradients to updates.

An optimizer is a config with the peak of its learning rate and `make(schedule, num_steps)`. Weight decay is per step,
times the learning rate. It applies to weights, which are known by their names; see `_is_weight`.
"""

import re
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from optax import contrib

from gradtrail.core.config import NotNegative, Positive, Share, config
from gradtrail.core.nn.models import Params
from gradtrail.core.train.schedules import Schedule, learning_rate
from gradtrail.core.train.start import NO_START, StartConfig, tuned

# Names of weights, by the last part of their path: Flax says kernel and embedding, Equinox weight, and Haiku w
_WEIGHT = re.compile(r"(kernel|weight|embedding)s?(_\w+)?|[wW]\d*")
_HEADS_LAST = {"query", "key", "value"}  # layers of Flax's attention whose kernels are inputs × heads × features
_TINY = 1e-30  # added to a second moment, far too small to change it: the root of 0 has no derivative


@config
class _Optimizer:
    """What the optimizers have in common."""

    learning_rate: Positive  # peak of the schedule

    def rate(self, schedule: Schedule, num_steps: int) -> optax.Schedule:
        """Return the learning rate as a function of the step, from 0, in a training of `num_steps`."""
        return learning_rate(schedule, self.learning_rate, num_steps)

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        """Return the transformation from gradients to updates."""
        raise NotImplementedError


@config
class SGD(_Optimizer):
    """Stochastic gradient descent."""

    kind: ClassVar = "sgd"
    momentum: Share  # decay of the running sum of gradients; 0 for none
    nesterov: bool

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        return optax.sgd(self.rate(schedule, num_steps), momentum=self.momentum or None, nesterov=self.nesterov)


@config
class RMSprop(_Optimizer):
    """RMSprop (Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning, 2012)."""

    kind: ClassVar = "rmsprop"
    decay: Share  # decay of the second moment
    eps: Positive  # added to the second moment, before the root is taken
    momentum: Share  # decay of the running sum of updates; 0 for none

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        rate = self.rate(schedule, num_steps)
        return optax.rmsprop(rate, self.decay, self.eps, momentum=self.momentum or None)


@config
class Adam(_Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980)."""

    kind: ClassVar = "adam"
    b1: Share  # decay of the first moment
    b2: Share  # decay of the second moment
    eps: Positive  # added to the root of the second moment

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        return optax.adam(self.rate(schedule, num_steps), self.b1, self.b2, self.eps, _TINY)


@config
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    kind: ClassVar = "adamw"
    weight_decay: NotNegative

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        rate = self.rate(schedule, num_steps)
        return optax.adamw(rate, self.b1, self.b2, self.eps, _TINY, weight_decay=self.weight_decay, mask=_are_weights)


@config
class Lion(_Optimizer):
    """Lion (Chen et al., arXiv 2302.06675), whose learning rate should be 3 to 10 times smaller than that of Adam."""

    kind: ClassVar = "lion"
    b1: Share  # weight of the momentum in the update, whose sign is taken
    b2: Share  # decay of the momentum
    weight_decay: NotNegative

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        rate = self.rate(schedule, num_steps)
        return optax.lion(rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=_are_weights)


@config
class Muon(_Optimizer):
    """Muon (Jordan, kellerjordan.github.io/posts/muon): orthogonalized momentum for matrices, Adam for the rest."""

    kind: ClassVar = "muon"
    adam_learning_rate: Positive  # peak of the schedule for all parameters but the weights of products
    beta: Share  # decay of the momentum
    weight_decay: NotNegative  # of the weights of products

    def make(self, schedule: Schedule, num_steps: int) -> optax.GradientTransformation:
        return contrib.muon(
            self.rate(schedule, num_steps),
            beta=self.beta,
            weight_decay=self.weight_decay,
            adam_learning_rate=learning_rate(schedule, self.adam_learning_rate, num_steps),
            muon_weight_dimension_numbers=_matrix_axes,
        )


Optimizer: TypeAlias = SGD | RMSprop | Adam | AdamW | Lion | Muon


def make_optimizer(
    optimizer: Optimizer, schedule: Schedule, clip_norm: float | None, num_steps: int, start: StartConfig = NO_START
) -> optax.GradientTransformation:
    """Return the transformation from gradients to updates: clipping to a global norm, then the optimizer.

    Optax mixes integers and floats, so it runs under standard dtype promotion whatever the caller has set.
    """
    clipping = optax.identity() if clip_norm is None else _clipping(clip_norm)
    rule = optimizer.make(schedule, num_steps)
    init, update = optax.chain(clipping, tuned(start, rule) if start.enabled else rule)
    lenient = jax.numpy_dtype_promotion("standard")
    return optax.GradientTransformation(lenient(init), lenient(update))


def squared_norm(tree: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """Return the squared global L2 norm, float32.

    XLA's CPU backend sums the squares of a vector in one pass. It writes those of a matrix, or without the barrier, to
    memory and then adds window by window: ten times slower, and an eighth of a small network's step.
    """
    vectors = jax.lax.optimization_barrier([leaf.ravel() for leaf in jax.tree.leaves(tree)])
    wide = (vector.astype(jnp.float32) for vector in vectors)
    return sum((jnp.sum(vector * vector) for vector in wide), start=jnp.float32(0))


def _clipping(limit: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm of `limit`, as `optax.clip_by_global_norm` does, which has a slow norm."""

    def clipped(grads: Params, _: Params | None) -> Params:
        norm = jnp.sqrt(squared_norm(grads))
        factor = jnp.where(norm > limit, limit / norm, 1.0)
        return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), grads)

    return optax.stateless(clipped)


def _name_of(path: Any) -> list[str]:
    """Return the parts of the name of a parameter: attributes, keys and places."""
    return re.split(r"[/.]", jax.tree_util.keystr(path, simple=True, separator="/"))


def _is_weight(path: Any, leaf: Array) -> bool:
    """Whether weight decay applies to a parameter: a weight by its name, with several axes.

    The number of axes alone does not tell: a bias may have the shape of the heads of an attention, or (1, outputs), and
    the weight of a norm in Equinox has one axis.
    """
    return leaf.ndim > 1 and _WEIGHT.fullmatch(_name_of(path)[-1]) is not None


def _are_weights(params: Params) -> PyTree[bool]:
    return jax.tree.map_with_path(_is_weight, params)


def _matrix_axes(params: Params) -> PyTree[contrib.MuonDimensionNumbers | None]:
    """Return the axes by which Muon makes a weight a matrix of inputs by outputs; None for other parameters.

    The last axis are the outputs. For query, key and value in Flax's attention these are all axes but the first, and
    for a parameter that is named `weight`, as in Equinox, the first. An `embedding` is a table, not a matrix.
    """

    def axes(path: Any, leaf: Array) -> contrib.MuonDimensionNumbers | None:
        *above, name = _name_of(path)
        if not _is_weight(path, leaf) or name.startswith("embedding"):
            return None
        first = 1 if {*above[-1:]} & _HEADS_LAST else leaf.ndim - 1
        outputs = (0,) if name.startswith("weight") else tuple(range(first, leaf.ndim))
        inputs = tuple(axis for axis in range(leaf.ndim) if axis not in outputs)
        return contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)

    return jax.tree.map_with_path(axes, params)
