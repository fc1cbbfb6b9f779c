"""The section `train.start` of `params.yaml`: a training from trained weights, of which some layers may be frozen."""

import functools
from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from gradtrail.core.config import PositiveFraction, config
from gradtrail.core.nn.models import Params


@config
class StartConfig:
    """Weights to start from; without them, the other fields have no effect."""

    weights: str | None  # path of a safetensors file; None for random weights
    sha256: str | None  # digest of the file, in hex: other content is another state
    freeze: tuple[str, ...]  # names of layers, or beginnings of them, that have no updates and no part in any norm
    rate: PositiveFraction  # factor of the updates, weight decay included, of the parameters that the file has

    @property
    def enabled(self) -> bool:
        return self.weights is not None

    def is_frozen(self, path: str) -> bool:
        """Whether a layer, or the parameter at a path, is not trained."""
        return self.enabled and any(f"{path}/".startswith(f"{name}/") for name in self.freeze)


@config
class ReadStart(StartConfig):
    """Weights that were read."""

    drawn: tuple[str, ...]  # paths of the parameters that the file does not have


NO_START = StartConfig(weights=None, sha256=None, freeze=(), rate=1.0)


def where_frozen(start: StartConfig, frozen: PyTree, trained: PyTree) -> PyTree:
    """Return the leaves of `frozen` for parameters that are not trained, and those of `trained` for the others."""
    if not (start.enabled and start.freeze):
        return trained
    return jax.tree.map(lambda first, *both: both[not first], _marked(start.is_frozen, frozen), frozen, trained)


def tuned(start: StartConfig, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer without a state for frozen parameters; those of the file have a fraction of its updates."""
    drawn = start.drawn if isinstance(start, ReadStart) else ()  # static costs are those of a file with all of them
    trained = functools.partial(_marked, lambda path: not start.is_frozen(path))
    taken = functools.partial(_marked, lambda path: path not in drawn)
    return optax.chain(optax.masked(optimizer, trained), optax.masked(optax.scale(start.rate), taken))


def _marked(test: Callable[[str], bool], params: Params) -> PyTree[bool]:
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return jax.tree.map_with_path(lambda path, _: test(keystr(path)), params)
