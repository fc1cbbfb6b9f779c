"""The passes over a data set that an analysis of gradients consists of, each compiled once, data-parallel over devices.

Microbatch sizes follow from the network alone, by fixed budgets of memory: no setting of the machine changes them, and
so none changes a result.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from gradtrail.core import batching, per_example
from gradtrail.core.data import Split
from gradtrail.core.gradients import scores
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.sharding import data_parallel, over_batch, replicated, with_sharding
from gradtrail.core.xla.compiler import CompiledFunction, Compiler, compile_within

_LARGEST_BATCH = 512  # examples per device: larger batches are no faster
_TEMPORARY_BYTES = 24 * 2**20  # temporary arrays of a microbatch: more than fits into a CPU's caches is slower
_FEWEST_SUMMED = 8  # smallest microbatch of a sum, whatever its memory
_FLOPS_PER_BYTE = 10  # FLOPs in the time of one byte of memory traffic, as measured on CPUs


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A function compiled for one batch size, applied to splits of any size."""

    # (whole, batch) → (sums over the batch, dict of arrays with a row per example), all pytrees; `whole` has the
    # inputs that all examples share, such as the parameters
    function: CompiledFunction
    batch_size: int  # number of examples over all devices

    def __call__(self, whole: Any, *arrays: np.ndarray, advance: Callable[..., object]) -> dict[str, np.ndarray]:
        """Return a row for each row of `arrays`; `advance` is called with the number of rows of each batch."""
        parts = []
        for part in batching.map_batches(lambda *batch: self.function(whole, batch)[1], self.batch_size, *arrays):
            parts.append(part)
            advance(len(next(iter(part.values()))))
        return batching.join(parts)

    def masked_batch(self, split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a batch of these rows, padded with repeated rows, whose mask is false."""
        padded = np.resize(rows, self.batch_size)
        return split.images[padded], split.labels[padded], np.arange(self.batch_size) < len(rows)

    @property
    def work(self) -> float:
        """Static cost of one example, in FLOPs: those of the program, or its memory traffic if that takes longer."""
        cost = self.function.cost
        return max(cost.flops, _FLOPS_PER_BYTE * cost.touched_bytes) / self.batch_size


@dataclass(frozen=True, kw_only=True)
class GradientPasses:
    """The compiled passes."""

    mesh: Mesh  # the devices that each batch is split over
    score: Pass  # whole = params; rows = the scores of `scores.score_batch`
    dots: Pass  # whole = (params, two directions); row `dots` = inner products of the example's gradient with both
    # whole = (params, signals of the influenced examples); row `products` = inner products of the example's gradient
    # with theirs
    products: Pass
    signals: CompiledFunction  # params, images, labels → signals, of as many examples as `products` takes
    sums: Pass  # whole = params, batch = (images, labels, mask); sum = the summed gradient

    def place(self, params: Params | HostParams) -> Params:
        """Copy parameters to every device, once for many calls."""
        return jax.device_put(params, replicated(self.mesh))

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        passes = (self.score, self.dots, self.products, self.sums)
        return [*(compiled.function for compiled in passes), self.signals]


def compile_passes(
    model: Model,
    label_smoothing: float,
    num_others: int,
    *,
    compiler: Compiler,
    mesh: Mesh,
) -> GradientPasses:
    """Compile all passes for microbatches whose temporary arrays take at most 24 MiB on a device.

    A single example may take more, and so may the 8 examples of a sum; a microbatch has at most 512 examples a device.

    Args:
        num_others: number of examples whose gradients `products` compares with.
        mesh: the devices that each batch is split over.
    """
    params = model.abstract_params()
    two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), params)
    influenced = _abstract_rows(model, num_others)
    compute_signals = functools.partial(per_example.signals, model, label_smoothing=label_smoothing)
    signals = jax.eval_shape(compute_signals, params, *influenced)

    def score(params: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        return (), scores.score_batch(model, params, *batch, label_smoothing=label_smoothing)

    def dots(whole: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        params, directions = whole
        return (), {"dots": per_example.grad_dots(model, params, *batch, directions, label_smoothing=label_smoothing)}

    def products(whole: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        params, signals = whole
        return (), {
            "products": per_example.grad_products(model, params, *batch, signals, label_smoothing=label_smoothing)
        }

    def sums(params: Any, batch: tuple[Array, Array, Array]) -> tuple[PyTree, PyTree]:
        return per_example.summed_grad(model, params, *batch, label_smoothing=label_smoothing), ()

    def compile_pass(name: str, function: Callable, whole: Any, *, masked: bool = False) -> Pass:
        """Compile a function for the largest microbatch within the budget; a `masked` one takes a mask too."""

        def compile_at(rows: int) -> CompiledFunction:
            count = rows * mesh.size
            mask = (jax.ShapeDtypeStruct((count,), bool),) if masked else ()
            batch = with_sharding((*_abstract_rows(model, count), *mask), over_batch(mesh))
            return compiler.compile(name, data_parallel(function, mesh), with_sharding(whole, replicated(mesh)), batch)

        at_least = _FEWEST_SUMMED if masked else 1
        compiled, rows = compile_within(_TEMPORARY_BYTES, _LARGEST_BATCH, compile_at, at_least=at_least)
        return Pass(function=compiled, batch_size=rows * mesh.size)

    return GradientPasses(
        mesh=mesh,
        score=compile_pass("score", score, params),
        dots=compile_pass("grad_dots", dots, (params, two)),
        products=compile_pass("grad_products", products, (params, signals)),
        signals=compiler.compile(
            "signals",
            compute_signals,
            *with_sharding((params, *influenced), replicated(mesh)),
            out_shardings=replicated(mesh),
        ),
        sums=compile_pass("sum_grads", sums, params, masked=True),
    )


def _abstract_rows(model: Model, count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    images = jax.ShapeDtypeStruct((count, *model.config.image_shape), jnp.uint8)
    return images, jax.ShapeDtypeStruct((count,), jnp.int32)
