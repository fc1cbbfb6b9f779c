"""The networks as pure functions of their parameters.

A network is a Flax NNX module; a `Model` holds its static part, so that all other code handles parameters as a plain
pytree of arrays under `jax.jit`, `grad` and `vmap`.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree, UInt8

from gradtrail.core.batching import normalize
from gradtrail.core.config import Bounds, ConfigError, Count, config
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.layers import Layer, identity_tap
from gradtrail.core.nn.mlp import MLP, Linear
from gradtrail.core.nn.own import WRAPPER, Own, faults
from gradtrail.core.nn.resnet import ResNet

Params: TypeAlias = PyTree[Float[Array, "..."]]
HostParams: TypeAlias = PyTree[Float[np.ndarray, "..."]]
AbstractParams: TypeAlias = PyTree[Float[jax.ShapeDtypeStruct, "..."]]
WeightsKind = Literal["final", "best"]
Normalization: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
_PATCHES_BYTES = 8 * 2**20  # patches of a tile's largest convolution; half and twice as much take as long or longer


Network: TypeAlias = Linear | MLP | CNN | ResNet | Own


@config
class ModelConfig:
    """Everything that determines a network and the shapes of its parameters; stored with the weights."""

    network: Network
    precision: Precision
    image_shape: tuple[Count, ...]  # height and width in pixels; in color also the number of channels
    num_classes: Count
    # means and standard deviations of the channels, in 0..1, by which the network's inputs are standardized
    normalization: Normalization | None = None

    def check(self) -> None:
        Bounds(at_least=2, at_most=3).check("image_shape: number of axes", len(self.image_shape))

    @property
    def name(self) -> str:
        """A short name for tables, such as `mlp-256-128`."""
        name: str = self.network.name
        return name


class Model:
    """The pure functions of a network.

    With `remat`, the backward pass recomputes the activations of convolutional blocks instead of storing them: less
    memory, more FLOPs. Dense layers always store theirs, which are small.
    """

    def __init__(self, config: ModelConfig, *, remat: bool = False):
        self.config = config
        self._remat = remat
        abstract: nnx.Module = nnx.eval_shape(lambda: self._make_network(nnx.Rngs(0)))
        self._graphdef = nnx.graphdef(abstract)
        self._layers = _layers(abstract)
        self._abstract_params = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
        if isinstance(config.network, Own):
            self._check_own(config.network.path)

    def init(self, *, key: Key[Array, ""]) -> Params:
        """Draw initial parameters: nested dicts of float32 arrays."""
        network = self._make_network(nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(network, nnx.Param))

    def apply(
        self,
        params: Params,
        images: UInt8[Array, "batch height width *channels"] | Float[Array, "batch height width *channels"],
        *,
        key: Key[Array, " batch"] | None = None,
        tap: Callable[[str, Layer, Array], Array] | None = None,
    ) -> Float[Array, "batch classes"]:
        """Return the logits, float32.

        Args:
            images: uint8 pixels, or float32 in 0..1.
            key: one key per example for dropout; None for no dropout, as in evaluation.
            tap: (name of a layer, layer, inputs) → outputs; called instead of every layer with parameters. Switches
                rematerialization off.
        """
        inputs = normalize(images) if images.dtype == jnp.uint8 else images
        if self.config.normalization is not None:
            numbers = jnp.array(self.config.normalization, jnp.float32)
            mean, deviation = numbers.reshape(2, *[1] * (inputs.ndim - 1), -1)
            inputs = (inputs - mean) / deviation
        network: Any = nnx.merge(self._graphdef, nnx.State(params))
        if tap is None:
            return network(inputs, key, identity_tap)
        names = {id(layer): name for name, layer in _layers(network).items()}
        return network(inputs, key, lambda layer, inputs: tap(names[id(layer)], layer, inputs))

    def tile_size(self, num_rows: int) -> int:
        """Return the number of examples per tile whose im2col patches fit in the CPU cache.

        This is the largest divisor of `num_rows` whose patches, as float32, take no more than 8 MiB; the whole batch if
        only tiles below a quarter of that divide it, or if nothing is convolved.
        """
        network = self.config.network
        patches = network.largest_patches(self.config.image_shape) if isinstance(network, CNN | ResNet) else 1
        largest = min(num_rows, _PATCHES_BYTES // (4 * patches))
        tile = max(size for size in range(1, max(1, largest) + 1) if num_rows % size == 0)
        return tile if 4 * tile >= largest else num_rows

    def layers(self) -> dict[str, Layer]:
        """Return the layers that have parameters by name, such as `layers/0`, with abstract arrays."""
        return self._layers

    def split_by_layer(self, params: Params) -> dict[str, Params]:
        """Split a pytree like the parameters by layer: the entry of a layer is like its own parameters."""
        parts: dict[str, Params] = {}
        for name in self.layers():
            keys = [int(key) if key.isdecimal() else key for key in name.split("/")]
            parts[name] = functools.reduce(operator.getitem, keys, params)
        return parts

    def from_paths(self, leaves: Mapping[str, Any]) -> PyTree:
        """Return the parameters from their leaves by path, see `by_path`; other leaves are ignored."""
        template = self.abstract_params()
        return jax.tree.unflatten(jax.tree.structure(template), [leaves[path] for path in by_path(template)])

    def abstract_params(self) -> AbstractParams:
        return self._abstract_params

    def _check_own(self, path: str) -> None:
        """Raise ConfigError, one line, unless the module of a file gives logits and its layers have all parameters."""
        params, shape = self.abstract_params(), self.config.image_shape
        images = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        tapped: list[str] = []

        def tap(name: str, layer: Layer, inputs: Array) -> Array:
            tapped.append(name)
            return identity_tap(layer, inputs)

        with faults(path, f"the network on images of shape {images.shape}"):
            for function in (self.apply, functools.partial(self.apply, tap=tap)):
                logits: Any = jax.eval_shape(function, params, images)
                if (logits.shape, logits.dtype) != ((2, self.config.num_classes), jnp.float32):
                    raise ConfigError(
                        f"{path}: logits must be float32 of shape {(2, self.config.num_classes)} for images of shape "
                        f"{images.shape}, got {logits.dtype} of shape {logits.shape}"
                    )
        layers = self.layers()
        if sorted(tapped) != sorted(layers):
            raise ConfigError(
                f"{path}: must call each Layer once through `tap`, got {', '.join(sorted(tapped)) or 'none'}"
            )
        parameters = {
            f"{name}/{parameter}"
            for name, layer in layers.items()
            for parameter in by_path(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
        }
        for parameter in sorted(by_path(params).keys() ^ parameters):
            fault = "two layers; wrap both modules as one" if parameter in parameters else "no Layer; wrap its module"
            raise ConfigError(f"{path}: the parameter {parameter} belongs to {fault}: {WRAPPER}")

    def _make_network(self, rngs: nnx.Rngs) -> nnx.Module:
        config = self.config
        network: Any = config.network.build(
            config.image_shape, config.num_classes, precision=config.precision, rngs=rngs
        )
        if not isinstance(config.network, Own):  # of whose module it may be another attribute
            network.remat = self._remat
        return network


def num_parameters(params: Params | HostParams | AbstractParams) -> int:
    """Count the scalars in a pytree of arrays or of abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def by_path(params: Params | HostParams | AbstractParams) -> dict[str, Any]:
    """Return the leaves of a pytree like the parameters by their paths, such as `layers/0/kernel`."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _layers(network: nnx.Module) -> dict[str, Layer]:
    """Return the layers of a network in order, by the paths of their parameters; not those within a layer."""
    modules = nnx.iter_modules(network)
    layers = {"/".join(map(str, path)): module for path, module in modules if isinstance(module, Layer)}
    return {name: layer for name, layer in layers.items() if not any(name.startswith(f"{outer}/") for outer in layers)}
