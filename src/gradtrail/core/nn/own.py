"""A network of one's own: the class `Network` of a file in `pipeline/networks`, in Flax NNX or as two functions.

`Network` is a config whose fields are the other keys of `train.own`. Its method `build(shape, num_classes, *, rngs)`
returns a Flax NNX module `images -> logits`, or an object with `init(key) -> params` and `apply(params, images) ->
logits`. Its parameters are float32; it has no other state.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from gradtrail.core.config import ConfigError, config
from gradtrail.core.names import NETWORKS
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import Layer, Tap, identity_tap

WRAPPER = "gradtrail.core.nn.own.OtherLayer(module)"
_MAX_FAULT = 300  # characters of an error of the file
_PACKAGE = "gradtrail_networks"  # package of all files in `NETWORKS`, so that one can import from another
_REMEDIES = {
    nnx.BatchStat: "batch statistics, by which the logits of an image depend on other images: use nnx.GroupNorm or "
    "nnx.LayerNorm",
    nnx.RngState: "the state of a random generator, as nnx.Dropout does: take `key` in __call__ and use "
    "gradtrail.core.nn.layers.dropout",
}


@config
class Own:
    """A network of one's own."""

    kind: ClassVar = "own"
    file: str  # name of the file in `NETWORKS`, without `.py`
    config: Any  # instance of the class `Network` of the file

    @staticmethod
    def config_class(file: object) -> type:
        """Return the class `Network` of a file; raise ConfigError, one line, if there is none."""
        if not isinstance(file, str) or not file.isidentifier():
            raise ConfigError(f"must be the name of a file in {NETWORKS} without .py, got {file!r}")
        path = NETWORKS / f"{file}.py"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            files = ", ".join(sorted(one.stem for one in NETWORKS.glob("*.py"))) or "none"
            raise ConfigError(f"{path}: no such file; {NETWORKS} has {files}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        network = getattr(_load(path.resolve(), text, str(path)), "Network", None)
        if not (dataclasses.is_dataclass(network) and hasattr(network, "build")):
            raise ConfigError(
                f"{path}: has no class Network with @config of gradtrail.core.config and a method "
                "build(shape, num_classes, *, rngs)"
            )
        return network  # type: ignore[return-value] # mypy: is_dataclass holds for instances too

    @property
    def name(self) -> str:
        return self.file

    @property
    def path(self) -> str:
        return str(NETWORKS / f"{self.file}.py")

    @property
    def dropout(self) -> float:
        """The field `dropout` of the file's config: if it is not 0, a training passes keys to the module."""
        return getattr(self.config, "dropout", 0.0)

    def build(self, shape: tuple[int, ...], num_classes: int, *, precision: Precision, rngs: nnx.Rngs) -> nnx.Module:
        """Return the network, called with images, keys and a tap as all networks are; raise ConfigError if it fails.

        A module that takes `tap` is that itself. Any other is a single layer: unless `build` takes `precision`, its
        parameters and inputs are rounded to it, as all operations are then.
        """
        takes_precision = "precision" in inspect.signature(self.config.build).parameters
        with faults(self.path, "build"):
            options = {"precision": precision} if takes_precision else {}
            module = self.config.build(shape, num_classes, rngs=nnx.Rngs(rngs.params()), **options)
            if not isinstance(module, nnx.Module):
                module = Functions(module, rngs.params())
        for kind, remedy in _REMEDIES.items():
            if jax.tree.leaves(nnx.state(module, kind)):
                raise ConfigError(f"{self.path}: the module keeps {remedy}")
        other_state = nnx.state(module, nnx.Not(nnx.Param))
        if dtypes := {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(module, nnx.Param))} - {"float32"}:
            raise ConfigError(f"{self.path}: parameters must be float32, got {', '.join(sorted(dtypes))}")
        if jax.tree.leaves(other_state):
            kinds = {type(value).__name__ for _, value in nnx.to_flat_state(other_state)}
            raise ConfigError(f"{self.path}: the module must keep nnx.Param alone, got {', '.join(sorted(kinds))}")

        arguments = inspect.signature(module.__call__).parameters
        if "key" in arguments and not hasattr(self.config, "dropout"):
            raise ConfigError(f"{self.path}: the module takes `key`, so Network needs a field `dropout`")
        if "tap" not in arguments:
            return SingleLayer(module, "float32" if takes_precision else precision, shape)
        if not takes_precision:
            raise ConfigError(f"{self.path}: build must take `precision`, as the layers need it that go through `tap`")
        return module


class OtherLayer(Layer):
    """Any module as a layer whose per-example gradients follow the definition, `vmap` of `vjp`; the batch comes first.

    The module is called with one example at a time, vectorized by `vmap`: no other example can influence its outputs.
    """

    def __init__(self, module: nnx.Module, precision: Precision = "float32"):
        self.module = module
        self.precision = precision

    def __call__(self, inputs: Float[Array, "batch ..."]) -> Float[Array, "batch ..."]:
        outputs: Array = jax.vmap(lambda example: self.on_batch(example[None])[0])(inputs)
        return outputs

    def on_batch(self, inputs: Float[Array, "batch ..."], **options: Any) -> Float[Array, "batch ..."]:
        """Call the module with the whole batch, which is faster."""
        module: Any = self.module
        if self.precision != "float32":
            graphdef, state = nnx.split(module)
            low = jax.tree.map(lambda leaf: leaf.astype(self.precision), state)
            module, inputs = nnx.merge(graphdef, low), inputs.astype(self.precision)
        outputs = module(inputs, **options)
        return outputs.astype(jnp.float32) if outputs.dtype.itemsize == 2 else outputs


class WholeNetwork(OtherLayer):
    """The only layer of a network without `tap`.

    A tap passes one array of floats to a layer. With `key` this is, of each example, its inputs as a vector and then
    the halves of the words of its key, which float32 holds exactly.
    """

    def __init__(self, module: nnx.Module, precision: Precision, shape: tuple[int, ...]):
        super().__init__(module, precision)
        self.shape = shape

    def __call__(self, inputs: Float[Array, "batch ..."]) -> Float[Array, "batch ..."]:
        if inputs.shape[1:] == self.shape:
            return super().__call__(inputs)

        def call(row: Array) -> Array:
            size = math.prod(self.shape)
            high, low = jnp.split(row[size:].astype(jnp.uint32), 2)
            key = jax.random.wrap_key_data((high << 16) | low)
            return self.on_batch(row[:size].reshape(1, *self.shape), key=key[None])[0]

        outputs: Array = jax.vmap(call)(inputs)
        return outputs

    def with_keys(self, inputs: Float[Array, "batch ..."], key: Key[Array, " batch"]) -> Float[Array, "batch _"]:
        """Return the inputs of a call with keys."""
        words = jax.random.key_data(key)
        halves = jnp.concatenate([words >> 16, words & 0xFFFF], axis=1).astype(inputs.dtype)
        return jnp.concatenate([inputs.reshape(len(inputs), -1), halves], axis=1)


class SingleLayer(nnx.Module):
    """A network that is one layer."""

    def __init__(self, module: nnx.Module, precision: Precision, shape: tuple[int, ...]):
        self.network = WholeNetwork(module, precision, shape)
        self.takes_key = "key" in inspect.signature(module.__call__).parameters

    def __call__(self, inputs: Float[Array, "batch ..."], key: Key[Array, " batch"] | None, tap: Tap) -> Array:
        if tap is identity_tap:
            return self.network.on_batch(inputs, **({"key": key} if self.takes_key else {}))
        if self.takes_key and key is not None:
            inputs = self.network.with_keys(inputs, key)
        return tap(self.network, inputs)


class Functions(nnx.Module):
    """The functions `init` and `apply` of an object as a module."""

    def __init__(self, functions: Any, key: Key[Array, ""]):
        self.params = nnx.data(jax.tree.map(nnx.Param, functions.init(key)))
        self.function = functions.apply

    def __call__(self, images: Float[Array, "batch ..."]) -> Array:
        params = jax.tree.map(lambda param: param[...], self.params, is_leaf=lambda node: isinstance(node, nnx.Param))
        logits: Array = self.function(params, images)
        return logits


@contextlib.contextmanager
def faults(path: str, action: str) -> Iterator[None]:
    """Raise ConfigError, one line with the file and its line, for whatever the code of a file raises."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
            lines.append(error.lineno)
        place = f"{path}:{lines[-1]}" if lines else path
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_FAULT]
        raise ConfigError(f"{place}: {action} fails: {fault}") from error


@functools.lru_cache(maxsize=8)  # the same text is the same class
def _load(path: Path, text: str, name: str) -> types.ModuleType:  # path: files of one text in two folders
    package = sys.modules.setdefault(_PACKAGE, types.ModuleType(_PACKAGE))
    if package.__dict__.get("__path__") != [str(path.parent)]:  # where Python looks for other files
        package.__path__ = [str(path.parent)]
        for other in [other for other in sys.modules if other.startswith(f"{_PACKAGE}.")]:
            del sys.modules[other]
    module = types.ModuleType(f"{_PACKAGE}.{path.stem}")
    module.__package__ = _PACKAGE
    sys.modules[module.__name__] = module  # where dataclasses look types up
    with faults(name, "import"):
        exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102  # code of the project's owner
    return module
