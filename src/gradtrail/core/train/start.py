"""The section `train.start` of `params.yaml`: a training from trained weights, of which some layers may be frozen."""

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from gradtrail.core.config import PositiveFraction, config
from gradtrail.core.nn.models import Params
from gradtrail.core.train.privacy import check_sha256


@config
class StartConfig:
    """Weights to begin from; without them, the other fields have no effect."""

    weights: str | None  # path of a safetensors file; None for random weights
    sha256: str | None  # digest of the file, in hex: a file that changed is another state
    # names of layers, or beginnings of them, that are not trained: no update, no weight decay, no part in any norm
    freeze: tuple[str, ...]
    rate: PositiveFraction  # factor of the updates, weight decay included, of the parameters that the file has

    def check(self) -> None:
        check_sha256("sha256", self.sha256)

    @property
    def enabled(self) -> bool:
        """Whether the training begins from weights."""
        return self.weights is not None

    def is_frozen(self, path: str) -> bool:
        """Whether a layer, or the parameter at a path, is not trained."""
        return self.enabled and any(path == name or path.startswith(f"{name}/") for name in self.freeze)

    def rate_of(self, path: str) -> float:  # noqa: ARG002
        """Return the factor of the updates of the parameter at a path; while no file was read, that of taken ones."""
        return self.rate


@config
class ReadStart(StartConfig):
    """Weights that were read."""

    drawn: tuple[str, ...]  # paths of the parameters that the file does not have, and that are drawn

    def rate_of(self, path: str) -> float:
        return 1.0 if path in self.drawn else self.rate


NO_START = StartConfig(weights=None, sha256=None, freeze=(), rate=1.0)


def where_frozen(start: StartConfig, frozen: PyTree, trained: PyTree) -> PyTree:
    """Return the leaves of `frozen` for parameters that are not trained, and those of `trained` for the others."""
    if not (start.enabled and start.freeze):
        return trained

    def choose(path: Any, frozen: Any, trained: Any) -> Any:
        return frozen if start.is_frozen(_name_of(path)) else trained

    return jax.tree.map_with_path(choose, frozen, trained)


def tuned(start: StartConfig, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer without a state for frozen parameters, whose updates are multiplied by their `rate_of`."""

    def is_trained(params: Params) -> PyTree[bool]:
        return where_frozen(start, *(jax.tree.map(lambda _, value=value: value, params) for value in (False, True)))

    def scaled(updates: Params, _: Params | None) -> Params:
        return jax.tree.map_with_path(lambda path, leaf: leaf * start.rate_of(_name_of(path)), updates)

    masked = optax.masked(optimizer, is_trained) if start.freeze else optimizer
    return optax.chain(masked, optax.stateless(scaled)) if start.rate != 1 else masked


def _name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
