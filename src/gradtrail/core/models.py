"""The networks, as pure functions of their parameters.

A network is a Flax NNX module; a `Model` holds its static part, so that everything else handles parameters as a plain
pytree of arrays and composes `jax.jit`, `grad` and `vmap` freely.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree, UInt8

from gradtrail.core.batches import normalize
from gradtrail.core.bounds import check
from gradtrail.core.precision import DotGeneral, Precision

Params: TypeAlias = PyTree[Float[Array, "..."]]
HostParams: TypeAlias = PyTree[Float[np.ndarray, "..."]]
AbstractParams: TypeAlias = PyTree[Float[jax.ShapeDtypeStruct, "..."]]
ModelKind = Literal["linear", "mlp"]
WeightsKind = Literal["final", "best"]


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A multilayer perceptron with ReLU.

    Attributes:
        hidden: width of each hidden layer, from the input on.
    """

    hidden: tuple[int, ...]

    def __post_init__(self) -> None:
        check("hidden: number of layers", len(self.hidden), at_least=1)
        for width in self.hidden:
            check("hidden", width, at_least=1)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that determines a network and the shapes of its parameters; stored beside the weights.

    Attributes:
        kind: `linear` is softmax regression.
        mlp: given if and only if `kind` is `mlp`.
        image_shape: height and width in pixels.
    """

    kind: ModelKind
    mlp: MLPConfig | None
    precision: Precision
    image_shape: tuple[int, int]
    num_classes: int

    @property
    def name(self) -> str:
        """A short name to read in a table, such as `mlp-256-128`."""
        return "-".join([self.kind, *(str(width) for width in self._hidden)])

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Number of inputs, of each hidden layer's units, and of classes."""
        return (self.image_shape[0] * self.image_shape[1], *self._hidden, self.num_classes)

    @property
    def _hidden(self) -> tuple[int, ...]:
        return self.mlp.hidden if self.mlp else ()


class Network(nnx.Module):
    """Dense layers with ReLU between them; weights drawn as by He et al. (arXiv 1502.01852), biases zero."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        widths = config.layer_widths
        self.layers = nnx.List(
            nnx.Linear(
                num_inputs,
                num_outputs,
                kernel_init=nnx.initializers.he_normal(),
                dot_general=DotGeneral(config.precision),
                rngs=rngs,
            )
            for num_inputs, num_outputs in itertools.pairwise(widths)
        )

    def __call__(self, images: Float[Array, "batch height width"]) -> Float[Array, "batch classes"]:
        activations = images.reshape(images.shape[0], -1)
        for layer in self.layers[:-1]:
            activations = jax.nn.relu(layer(activations))
        logits: Array = self.layers[-1](activations)
        return logits


class Model:
    """A network's pure functions.

    Args:
        config: the network.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._graphdef = nnx.graphdef(nnx.eval_shape(lambda: Network(config, rngs=nnx.Rngs(0))))

    def init(self, *, key: Key[Array, ""]) -> Params:
        """Draw the parameters: nested dicts of float32 arrays."""
        network = Network(self.config, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(network, nnx.Param))

    def apply(
        self, params: Params, images: UInt8[Array, "batch height width"] | Float[Array, "batch height width"]
    ) -> Float[Array, "batch classes"]:
        """Return the logits, float32.

        Args:
            params: as `init` gives them.
            images: uint8 pixels, or float32 in 0..1.
        """
        pixels = normalize(images) if images.dtype == jnp.uint8 else images
        network: Any = nnx.merge(self._graphdef, nnx.State(params))
        return network(pixels)

    def abstract_params(self) -> AbstractParams:
        """Return the parameters' shapes and dtypes, as `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(lambda: self.init(key=jax.random.key(0)))


def num_parameters(params: Params | HostParams | AbstractParams) -> int:
    """Count the scalars in a pytree of arrays or of abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
