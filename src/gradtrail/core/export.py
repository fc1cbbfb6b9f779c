"""The forward pass with calibrated probabilities as a standalone StableHLO program, by `jax.export`.

Its arguments are a dict of tensors, as safetensors loads one, and images; the program contains no weights, so networks
of one architecture share a program and its cached compilation.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Float, UInt8

from gradtrail.core.config import Bounds, config
from gradtrail.core.evaluate import log_mean_softmax, log_softmax
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.layers import Convolution, Layer, identity_tap
from gradtrail.core.nn.models import HostParams, Model, Params, by_path

Platform = Literal["cpu", "cuda"]
TEMPERATURE = "temperature"  # name of its scalar tensor

Images = UInt8[Array, "batch height width *channels"]


@config
class ExportConfig:
    """The section `export` of `params.yaml`."""

    # name of the model in MLflow's registry and in the paths of a server's endpoints; None for that of the data set
    name: str | None
    # batch sizes that a server compiles, ascending
    batch_sizes: tuple[Annotated[int, Bounds(at_least=1, at_most=65536)], ...]
    precisions: tuple[Precision, ...]  # of further programs for the same weights

    def check(self) -> None:
        """Refuse names that a path or MLflow cannot hold, and sizes that are not in order."""
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", self.name):
            raise ValueError(f"name: letters, digits, '_', '.' and '-' are allowed, up to 100; got {self.name[:100]!r}")
        if not self.batch_sizes or list(self.batch_sizes) != sorted({*self.batch_sizes}):
            raise ValueError(f"batch_sizes: must be one or more sizes, ascending; got {list(self.batch_sizes)}")


def tensors(members: Sequence[Params | HostParams], temperature: float) -> dict[str, np.ndarray]:
    """Return the tensors that are arguments of the program, float32.

    These are the parameters by their paths, such as `layers/0/kernel`, with a leading axis of members if there are
    several; and the scalar `temperature`.
    """
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves) if len(leaves) > 1 else np.asarray(leaves[0]), *members)
    return by_path(stacked) | {TEMPERATURE: np.asarray(temperature, np.float32)}


def forward(
    model: Model, num_members: int, *, unrolled: bool = False
) -> Callable[[Mapping[str, Array], Images], Float[Array, "batch classes"]]:
    """Return the function tensors, images → probabilities, float32.

    For one network these are softmax(logits / temperature); for several, softmax(log p / temperature) with their mean
    probabilities p, as in `evaluate`. The program has a loop over the members, or, if `unrolled`, each by itself.
    """

    def infer(params: Params, images: Images) -> Float[Array, "batch classes"]:
        return model.apply(params, images, tap=_infer)

    def calibrated(tensors: Mapping[str, Array], images: Images) -> Float[Array, "batch classes"]:
        params = model.from_paths(tensors)
        if num_members == 1:
            logits = infer(params, images)
        elif unrolled:
            members = (jax.tree.map(operator.itemgetter(index), params) for index in range(num_members))
            logits = log_mean_softmax(jnp.stack([infer(member, images) for member in members]))
        else:
            logits = log_mean_softmax(jax.lax.map(lambda member: model.apply(member, images), params))
        return jnp.exp(log_softmax(logits / tensors[TEMPERATURE]))

    return calibrated


def _infer(_: str, layer: Layer, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
    return layer.infer(inputs) if isinstance(layer, Convolution) else identity_tap(layer, inputs)


def export_forward(
    model: Model, tensors: Mapping[str, np.ndarray], num_members: int, platform: Platform
) -> export.Exported:
    """Export the forward pass for one platform, with any number of images, at least one.

    The bytes of `serialize()`, which needs flatbuffers, depend on the network and the versions of JAX and Flax alone:
    no path of a source file is in them.
    """
    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *model.config.image_shape), jnp.uint8)
    abstract = {name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for name, tensor in sorted(tensors.items())}
    with _no_source_locations():
        return export.export(jax.jit(forward(model, num_members)), platforms=(platform,))(abstract, images)


@contextlib.contextmanager
def _no_source_locations() -> Iterator[None]:
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
