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
from gradtrail.core.gradients.diagnostics import hessian_product
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.sharding import data_parallel, over_batch, replicated, with_sharding
from gradtrail.core.xla.compiler import CompiledFunction, Compiler, compile_within

_LARGEST_BATCH = 512  # examples per device: larger batches are no faster
_TEMPORARY_BYTES = 24 * 2**20  # temporary arrays of a microbatch: more than fits into a CPU's caches is slower
_FEWEST_SUMMED = 8  # smallest microbatch of a sum, whatever its memory


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A function compiled for one batch size, applied to splits of any size."""

    # (whole, batch) → (sums over the batch, dict of arrays with a row per example), all pytrees; `whole` has the
    # inputs that all examples share, such as the parameters
    function: CompiledFunction
    batch_size: int  # number of examples over all devices

    def __call__(self, whole: Any, *arrays: np.ndarray, advance: Callable[..., object]) -> dict[str, np.ndarray]:
        """Return a row for each row of `arrays`; `advance` is called with the number of rows of each batch."""

        def call(*batch: np.ndarray) -> dict[str, Array]:
            return self.function(whole, batch)[1]

        parts = []
        for part in batching.map_batches(call, self.batch_size, *arrays):
            parts.append(part)
            advance(len(next(iter(part.values()))))
        return batching.join(parts)


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
    # whole = (params, direction), batch as for `sums`; sum = the Hessian of the summed loss times the direction. None
    # without curvature.
    hessian: Pass | None

    def place(self, params: Params | HostParams) -> Params:
        """Copy parameters to every device, once for many calls."""
        return jax.device_put(params, replicated(self.mesh))

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        passes = (self.score, self.dots, self.products, self.sums, self.hessian)
        return [*(compiled.function for compiled in passes if compiled), self.signals]


def compile_passes(
    model: Model,
    label_smoothing: float,
    num_others: int,
    *,
    curvature: bool,
    compiler: Compiler,
    mesh: Mesh,
) -> GradientPasses:
    """Compile all passes for microbatches whose temporary arrays take at most 24 MiB on a device.

    A single example may take more, and so may the 8 examples of a sum; a microbatch has at most 512 examples a device.

    Args:
        num_others: number of examples whose gradients `products` compares with.
        curvature: True to compile the product with the Hessian too.
        mesh: the devices that each batch is split over.
    """
    params = model.abstract_params()
    compute_signals = functools.partial(per_example.signals, model, label_smoothing=label_smoothing)
    test_signals = _abstract_rows(model, num_others)
    compile_rows = functools.partial(_compile_pass, model, mesh, compiler)
    compile_sums = functools.partial(compile_rows, masked=True)
    two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), params)

    def score(params: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        return (), scores.score_batch(model, params, *batch, label_smoothing=label_smoothing)

    def dots(whole: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        params, directions = whole
        rows = per_example.grad_dots(model, params, *batch, directions, label_smoothing=label_smoothing)
        return (), {"dots": rows}

    def products(whole: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        params, test_signals = whole
        rows = per_example.grad_products(model, params, *batch, test_signals, label_smoothing=label_smoothing)
        return (), {"products": rows}

    def sums(params: Any, batch: tuple[Array, Array, Array]) -> tuple[PyTree, PyTree]:
        return per_example.summed_grad(model, params, *batch, label_smoothing=label_smoothing), ()

    def hessian(whole: Any, batch: tuple[Array, Array, Array]) -> tuple[PyTree, PyTree]:
        def grad(params: Params) -> Params:
            return per_example.summed_grad(model, params, *batch, label_smoothing=label_smoothing)

        return hessian_product(grad, *whole), ()

    return GradientPasses(
        mesh=mesh,
        score=compile_rows("score", score, params),
        dots=compile_rows("grad_dots", dots, (params, two)),
        products=compile_rows(
            "grad_products", products, (params, jax.eval_shape(compute_signals, params, *test_signals))
        ),
        signals=compiler.compile(
            "signals",
            compute_signals,
            *with_sharding((params, *test_signals), replicated(mesh)),
            out_shardings=replicated(mesh),
        ),
        sums=compile_sums("sum_grads", sums, params),
        hessian=compile_sums("hessian_product", hessian, (params, params)) if curvature else None,
    )


def masked_batch(sums: Pass, split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a batch of these rows, padded with repeated rows, whose mask is false."""
    filled = np.resize(rows, sums.batch_size)
    return split.images[filled], split.labels[filled], np.arange(sums.batch_size) < len(rows)


def mean_hessian_product(
    hessian: Pass, params: Params | HostParams, direction: Params | HostParams, *, split: Split
) -> HostParams:
    """Return the Hessian of the mean loss over a split times a direction, summed on the host in float64."""
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    for start in range(0, len(split), hessian.batch_size):
        rows = np.arange(start, min(start + hessian.batch_size, len(split)))
        part, _ = hessian.function((params, direction), masked_batch(hessian, split, rows))
        total = jax.tree.map(lambda sums, leaf: sums + np.asarray(leaf), total, part)
    return jax.tree.map(lambda leaf: leaf / len(split), total)


def _compile_pass(
    model: Model,
    mesh: Mesh,
    compiler: Compiler,
    name: str,
    function: Callable,
    whole: Any,
    *,
    masked: bool = False,
) -> Pass:
    """Compile a function for the largest microbatch within the budget; a `masked` one takes a mask of the rows too."""

    def compile_at(rows: int) -> CompiledFunction:
        count = rows * mesh.size
        mask = (jax.ShapeDtypeStruct((count,), bool),) if masked else ()
        batch = with_sharding((*_abstract_rows(model, count), *mask), over_batch(mesh))
        return compiler.compile(name, data_parallel(function, mesh), with_sharding(whole, replicated(mesh)), batch)

    at_least = _FEWEST_SUMMED if masked else 1
    compiled, rows = compile_within(_TEMPORARY_BYTES, _LARGEST_BATCH, compile_at, at_least=at_least)
    return Pass(function=compiled, batch_size=rows * mesh.size)


def _abstract_rows(model: Model, count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    images = jax.ShapeDtypeStruct((count, *model.config.image_shape), jnp.uint8)
    return images, jax.ShapeDtypeStruct((count,), jnp.int32)
