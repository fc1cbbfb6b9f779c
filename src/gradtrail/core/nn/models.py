"""The networks as pure functions of their parameters.

A network is a Flax NNX module; a `Model` holds its static part, so that all other code handles parameters as a plain
pytree of arrays under `jax.jit`, `grad` and `vmap`.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree, UInt8

from gradtrail.core.batching import normalize
from gradtrail.core.common.validation import AT_LEAST_ONE, MAX_WIDTH, SHARE, check, check_fields
from gradtrail.core.config import ConfigError
from gradtrail.core.names import model_name
from gradtrail.core.nn.arithmetic import Precision, max_pool, rematerialized
from gradtrail.core.nn.features import FeaturesKind, num_features, oriented_gradients, pixels_of, require_pixels
from gradtrail.core.nn.layers import (
    ActivationKind,
    Convolution,
    Dense,
    GroupNorm,
    Layer,
    LayerNorm,
    Tap,
    activate,
    dropout,
    folded,
    identity_tap,
)

Params: TypeAlias = PyTree[Float[Array, "..."]]
HostParams: TypeAlias = PyTree[Float[np.ndarray, "..."]]
AbstractParams: TypeAlias = PyTree[Float[jax.ShapeDtypeStruct, "..."]]
ModelKind = Literal["linear", "mlp", "cnn"]
NormKind = Literal["none", "group", "layer"]
WeightsKind = Literal["final", "best"]
_PATCHES_BYTES = 8 * 2**20  # patches of a tile's largest convolution; half and twice as much take as long or longer
_MAX_LAYERS = 256  # more would compile for minutes
_MAX_KERNEL = 31  # pixels of a kernel's side; the program copies the image once per pixel of the kernel


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A multilayer perceptron."""

    hidden: tuple[int, ...]  # width of each hidden layer, from the input on
    # activation of the hidden layers; a bounded one loses less to private clipping (Papernot et al., arXiv
    # 2007.14191)
    activation: ActivationKind
    dropout: float  # probability that a training step sets a hidden unit to zero

    def __post_init__(self) -> None:
        check("hidden: number of layers", len(self.hidden), at_least=1, at_most=_MAX_LAYERS)
        check_fields(self, hidden={"at_least": 1, "at_most": MAX_WIDTH}, dropout=SHARE)


@dataclass(frozen=True, kw_only=True)
class CNNConfig:
    """Stacks of convolution, normalization and activation, each ended by max pooling of 2 × 2; then dense layers."""

    channels: tuple[int, ...]  # channels of each stack, from the input on
    convolutions: int  # number of convolutions in each stack
    kernel_size: int  # side of each kernel in pixels, odd
    norm: NormKind  # normalization after each convolution
    groups: int  # number of channel groups, for `norm: group`
    hidden: tuple[int, ...]  # width of each hidden dense layer
    activation: ActivationKind  # activation of convolutions and hidden dense layers
    dropout: float  # probability with which a training step sets an input of a dense layer to zero

    def __post_init__(self) -> None:
        check("channels: number of stacks", len(self.channels), at_least=1)
        for count in (*self.channels, *self.hidden):
            check("channels" if count in self.channels else "hidden", count, at_least=1, at_most=MAX_WIDTH)
        check_fields(self, convolutions=AT_LEAST_ONE)
        num_layers = len(self.channels) * self.convolutions + len(self.hidden)
        check("channels, convolutions and hidden: number of layers", num_layers, at_most=_MAX_LAYERS)
        check_fields(self, kernel_size={"at_least": 1, "at_most": _MAX_KERNEL}, groups=AT_LEAST_ONE, dropout=SHARE)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")
        if self.norm == "group" and any(count % self.groups for count in self.channels):
            raise ValueError(f"groups must divide every one of channels {list(self.channels)}, got {self.groups}")

    def num_features(self, image_shape: tuple[int, int]) -> int:
        """Return the number of features that the stacks hand to the dense layers.

        Raises:
            ConfigError: there are so many stacks that pooling leaves no pixel.
        """
        height, width = (side // 2 ** len(self.channels) for side in image_shape)
        if not height * width:
            raise ConfigError(
                f"cnn.channels: {len(self.channels)} stacks, each of which halves the image, "
                f"leave nothing of {image_shape[0]} × {image_shape[1]} pixels"
            )
        return self.channels[-1] * height * width


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that determines a network and the shapes of its parameters; stored with the weights."""

    kind: ModelKind  # `linear` is softmax regression
    mlp: MLPConfig | None  # given if and only if `kind` is `mlp`
    cnn: CNNConfig | None  # given if and only if `kind` is `cnn`
    features: FeaturesKind  # fixed features instead of pixels; not `oriented_gradients` with `cnn`
    precision: Precision
    image_shape: tuple[int, int]  # height and width in pixels
    num_classes: int

    def __post_init__(self) -> None:
        for kind, part in (("mlp", self.mlp), ("cnn", self.cnn)):
            if (self.kind == kind) != (part is not None):
                raise ValueError(f"{kind} must be given if and only if kind is {kind}, which is {self.kind}")
        require_pixels(self.kind, self.features)
        check_fields(self, image_shape=AT_LEAST_ONE, num_classes=AT_LEAST_ONE)
        if self.cnn:
            self.cnn.num_features(self.image_shape)

    @property
    def name(self) -> str:
        """A short name for tables, such as `mlp-256-128`."""
        channels = self.cnn.channels if self.cnn else ()
        return model_name(self.kind, channels=channels, hidden=self._hidden, features=self.features)

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """Number of inputs of the first dense layer, units of each hidden one, and classes."""
        num_inputs = (
            self.cnn.num_features(self.image_shape) if self.cnn else num_features(self.features, self.image_shape)
        )
        return (num_inputs, *self._hidden, self.num_classes)

    @property
    def activation(self) -> ActivationKind:
        """Of hidden layers, if there are any."""
        return self.mlp.activation if self.mlp else self.cnn.activation if self.cnn else "relu"

    @property
    def dropout(self) -> float:
        """Probability of dropout; 0 for none."""
        return self.mlp.dropout if self.mlp else self.cnn.dropout if self.cnn else 0.0

    def largest_patches(self) -> int:
        """Return the number of scalars in one example's patches of the convolution that has the most; 0 without any."""
        if not self.cnn:
            return 0
        largest, num_inputs, (height, width) = 0, 1, self.image_shape
        for num_outputs in self.cnn.channels:
            widest = num_inputs if self.cnn.convolutions == 1 else max(num_inputs, num_outputs)
            largest = max(largest, self.cnn.kernel_size**2 * widest * height * width)
            num_inputs, height, width = num_outputs, height // 2, width // 2
        return largest

    @property
    def _hidden(self) -> tuple[int, ...]:
        return self.mlp.hidden if self.mlp else self.cnn.hidden if self.cnn else ()


class Block(nnx.Module):
    """A convolution, its normalization, and the activation; with max pooling at the end of a stack."""

    def __init__(
        self, convolution: Convolution, norm: GroupNorm | LayerNorm | None, activation: ActivationKind, *, pools: bool
    ):
        self.convolution = convolution
        self.norm = norm
        self.activation = activation
        self.pools = pools

    def __call__(self, inputs: Float[Array, "channels height width batch"], tap: Tap) -> Array:
        outputs = tap(self.convolution, inputs)
        if self.norm is not None:
            outputs = tap(self.norm, outputs)
        outputs = max_pool(outputs) if self.pools else outputs
        return activate(outputs, self.activation)  # after pooling, which it commutes with, it has a quarter of the work

    def recomputed(self, inputs: Float[Array, "channels height width batch"]) -> Array:
        """Apply the block; the backward pass recomputes its activations."""
        graphdef, state = nnx.split(self)
        return rematerialized(lambda state, inputs: nnx.merge(graphdef, state)(inputs, identity_tap))(state, inputs)


def make_norm(kind: NormKind, num_channels: int, groups: int) -> GroupNorm | LayerNorm | None:
    """Return the norm of a block; None for none."""
    if kind == "group":
        return GroupNorm(num_channels, groups)
    return LayerNorm(num_channels) if kind == "layer" else None


class Head(nnx.Module):
    """Dense layers with an activation between them: a whole perceptron, or the end of a convolutional network."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.layers = nnx.List(
            Dense(num_inputs, num_outputs, config.precision, rngs=rngs)
            for num_inputs, num_outputs in itertools.pairwise(config.layer_widths)
        )
        self.activation = config.activation
        self.dropout = config.dropout

    def classify(self, features: Float[Array, "batch features"], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        """Return the logits; `key` is for dropout of hidden units."""
        for index, layer in enumerate(self.layers[:-1]):
            features = dropout(activate(tap(layer, features), self.activation), self.dropout, folded(key, index))
        return tap(self.layers[-1], features)


class Perceptron(Head):
    """Softmax regression or a multilayer perceptron, of the pixels or of fixed features."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.features = config.features
        super().__init__(config, rngs=rngs)

    def __call__(self, images: Float[Array, "batch height width"], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        if self.features == "oriented_gradients":
            return self.classify(oriented_gradients(images), key, tap)
        return self.classify(pixels_of(images, self.features).reshape(images.shape[0], -1), key, tap)


class ConvolutionalNetwork(Head):
    """Stacks of convolutions, then dense layers.

    Args:
        remat: True if the backward pass recomputes the activations of each block.
    """

    def __init__(self, config: ModelConfig, cnn: CNNConfig, *, remat: bool, rngs: nnx.Rngs):
        widths = [1, *(count for count in cnn.channels for _ in range(cnn.convolutions))]
        self.blocks = nnx.List(
            Block(
                Convolution(cnn.kernel_size, *pair, config.precision, rngs=rngs),
                make_norm(cnn.norm, pair[1], cnn.groups),
                cnn.activation,
                pools=index % cnn.convolutions == 0,
            )
            for index, pair in enumerate(itertools.pairwise(widths), start=1)
        )
        self.remat = remat
        self.features = config.features
        super().__init__(config, rngs=rngs)

    def __call__(self, images: Float[Array, "batch height width"], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        activations = jnp.moveaxis(pixels_of(images, self.features), 0, -1)[None]
        for block in self.blocks:
            recomputes = self.remat and tap is identity_tap
            activations = block.recomputed(activations) if recomputes else block(activations, tap)
        features = activations.reshape(-1, images.shape[0]).T
        return self.classify(dropout(features, self.dropout, folded(key, len(self.layers))), key, tap)


class Model:
    """The pure functions of a network.

    Args:
        remat: True if the backward pass recomputes the activations of convolutional blocks instead of storing them:
            less memory, more FLOPs. Dense layers always store theirs, which are small.
    """

    def __init__(self, config: ModelConfig, *, remat: bool = False):
        self.config = config
        self._remat = remat
        self._graphdef = nnx.graphdef(nnx.eval_shape(lambda: self._make_network(nnx.Rngs(0))))

    def init(self, *, key: Key[Array, ""]) -> Params:
        """Draw initial parameters: nested dicts of float32 arrays."""
        network = self._make_network(nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(network, nnx.Param))

    def apply(
        self,
        params: Params,
        images: UInt8[Array, "batch height width"] | Float[Array, "batch height width"],
        *,
        key: Key[Array, " batch"] | None = None,
        tap: Callable[[str, Layer, Array], Array] | None = None,
    ) -> Float[Array, "batch classes"]:
        """Return the logits, float32.

        Args:
            params: a pytree like that of `init`.
            images: uint8 pixels, or float32 in 0..1.
            key: one key per example for dropout; None for no dropout, as in evaluation.
            tap: (name of a layer, layer, inputs) → outputs; called instead of every layer with parameters.
                Switches rematerialization off.
        """
        pixels = normalize(images) if images.dtype == jnp.uint8 else images
        network: Any = nnx.merge(self._graphdef, nnx.State(params))
        if tap is None:
            return network(pixels, key, identity_tap)
        names = {id(layer): name for name, layer in _layers(network).items()}
        return network(pixels, key, lambda layer, inputs: tap(names[id(layer)], layer, inputs))

    def tile_size(self, num_rows: int) -> int:
        """Return the number of examples per tile whose im2col patches fit in the CPU cache.

        This is the largest divisor of `num_rows` whose patches, as float32, take no more than 8 MiB; the whole batch if
        only tiles below a quarter of that divide it, or if nothing is convolved. It depends on shapes alone.
        """
        most = _PATCHES_BYTES // (4 * max(1, self.config.largest_patches()))
        tile = max(size for size in range(1, max(1, min(num_rows, most)) + 1) if num_rows % size == 0)
        return tile if 4 * tile >= min(num_rows, most) else num_rows

    def layers(self) -> dict[str, Layer]:
        """Return the layers that have parameters by name, such as `layers/0`, with abstract arrays."""
        return _layers(nnx.eval_shape(lambda: self._make_network(nnx.Rngs(0))))

    def split_by_layer(self, params: Params) -> dict[str, Params]:
        """Split a pytree like the parameters by layer."""
        parts = {}
        for name in self.layers():
            part = params
            for step in name.split("/"):
                part = part[int(step) if step.isdigit() else step]
            parts[name] = part
        return parts

    def from_layers(self, parts: Mapping[str, Params]) -> Params:
        """Join the parts of `split_by_layer` to a pytree like the parameters."""
        params: dict[Any, Any] = {}
        for name, part in parts.items():
            *path, last = [int(step) if step.isdigit() else step for step in name.split("/")]
            level = params
            for step in path:
                level = level.setdefault(step, {})
            level[last] = part
        return params

    def abstract_params(self) -> AbstractParams:
        """Return the parameters' shapes and dtypes, as `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(lambda: self.init(key=jax.random.key(0)))

    def _make_network(self, rngs: nnx.Rngs) -> Perceptron | ConvolutionalNetwork:
        if self.config.cnn:
            return ConvolutionalNetwork(self.config, self.config.cnn, remat=self._remat, rngs=rngs)
        return Perceptron(self.config, rngs=rngs)


def num_parameters(params: Params | HostParams | AbstractParams) -> int:
    """Count the scalars in a pytree of arrays or of abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def by_path(params: Params | HostParams | AbstractParams) -> dict[str, Any]:
    """Return the leaves of a pytree like the parameters by their paths, such as `layers/0/kernel`."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _layers(network: nnx.Module) -> dict[str, Layer]:
    """Return the layers of a network in order, by the paths of their parameters."""
    modules = nnx.iter_modules(network)
    return {"/".join(map(str, path)): module for path, module in modules if isinstance(module, Layer)}
