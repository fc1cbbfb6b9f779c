"""The passes over a data set that analyses of gradients are made of, each compiled once and shared out over devices.

Every figure of an example is its own, so that the size of a microbatch is a matter of memory alone. Sums over examples
go through batches of one fixed size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from gradtrail.core.common import batching
from gradtrail.core.common.sharding import data_parallel, make_mesh, over_batch, replicated, with_sharding
from gradtrail.core.common.split import Split
from gradtrail.core.gradients import scores
from gradtrail.core.gradients.diagnostics import hessian_product
from gradtrail.core.nn.models import HostParams, Model, Params, num_parameters
from gradtrail.core.per_example import norms
from gradtrail.core.xla.compiler import CompiledFunction, Compiler, compile_within

LARGEST_BATCH = 512  # of a device: larger ones gain nothing
_SUM_BYTES = 24 * 2**20  # of a pass that sums over a batch: fixed, so that no setting of memory changes the sum
_FEWEST_SUMMED = 8  # rows of such a batch, whatever they take
_CHUNKS_PER_CLASS = 10
_CHUNK_FLOATS = 2**27  # that the gradients of all chunks may take: 512 MiB


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A function of one size of batch, for splits of any size.

    Attributes:
        function: whole, batch → nothing, and a dict of rows; both pytrees of arrays.
        batch_size: over all devices.
    """

    function: CompiledFunction
    batch_size: int

    def __call__(self, whole: Any, *arrays: np.ndarray, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
        """Return the rows for all rows of `arrays`; `advance` hears how many are done."""

        def call(*batch: np.ndarray) -> dict[str, Array]:
            return self.function(whole, batch)[1]

        parts = []
        for part in batching.map_batches(call, self.batch_size, *arrays):
            parts.append(part)
            advance(len(next(iter(part.values()))))
        return batching.join(parts)


@dataclass(frozen=True, kw_only=True)
class GradientPasses:
    """All of them.

    Attributes:
        mesh: the devices that share each batch.
        score: params → the scores of each example, see `scores.score_batch`.
        dots: (params, directions), two directions → `dots` of each example's gradient with them.
        products: (params, signals of some examples) → `products` of each example's gradient with those of them.
        signals: params, images, labels → signals, of as many examples as `products` takes.
        sums: params, (images, labels, mask) → the summed gradient, and no rows.
        hessian: (params, direction), (images, labels, mask) → the Hessian of the summed loss times the direction, and
            no rows; None where nobody asks for the curvature.
    """

    mesh: Mesh
    score: Pass
    dots: Pass
    products: Pass
    signals: CompiledFunction
    sums: Pass
    hessian: Pass | None

    def place(self, params: Params | HostParams) -> Params:
        """Return parameters on every device, once for many calls."""
        return jax.device_put(params, replicated(self.mesh))

    @property
    def functions(self) -> list[CompiledFunction]:
        """All of them, for the profile."""
        passes = (self.score, self.dots, self.products, self.sums, self.hessian)
        return [*(each.function for each in passes if each), self.signals]


def compile_passes(
    model: Model,
    label_smoothing: float,
    num_others: int,
    *,
    curvature: bool,
    memory_budget: int,
    compiler: Compiler,
    mesh: Mesh | None = None,
) -> GradientPasses:
    """Compile all passes, with microbatches as large as a budget allows.

    Args:
        model: the network.
        label_smoothing: of the loss.
        num_others: examples whose gradients `products` compares with.
        curvature: whether to compile the product with the Hessian too.
        memory_budget: bytes that the temporary arrays of a pass may take on a device.
        compiler: that compiles them.
        mesh: the devices that share each batch, by default all of this process.

    Raises:
        ConfigError: a single example does not fit into the budget.
    """
    mesh = mesh or make_mesh()
    params = model.abstract_params()
    signals_of = functools.partial(norms.signals, model, label_smoothing=label_smoothing)
    others = _abstract_rows(model, num_others)
    compile_pass = functools.partial(_compile_pass, model, mesh, compiler)
    compile_rows = functools.partial(compile_pass, budget=memory_budget)
    compile_sums = functools.partial(compile_pass, budget=_SUM_BYTES, at_least=_FEWEST_SUMMED, masked=True)
    two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), params)

    def score(params: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        return (), scores.score_batch(model, params, *batch, label_smoothing=label_smoothing)

    def dots(whole: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        params, directions = whole
        found = norms.grad_dots(model, params, *batch, directions, label_smoothing=label_smoothing)
        return (), {"dots": found}

    def products(whole: Any, batch: tuple[Array, Array]) -> tuple[PyTree, PyTree]:
        params, others = whole
        found = norms.grad_products(model, params, *batch, others, label_smoothing=label_smoothing)
        return (), {"products": found}

    def sums(params: Any, batch: tuple[Array, Array, Array]) -> tuple[PyTree, PyTree]:
        return norms.summed_grad(model, params, *batch, label_smoothing=label_smoothing), ()

    def hessian(whole: Any, batch: tuple[Array, Array, Array]) -> tuple[PyTree, PyTree]:
        def grad(params: Params) -> Params:
            return norms.summed_grad(model, params, *batch, label_smoothing=label_smoothing)

        return hessian_product(grad, *whole), ()

    return GradientPasses(
        mesh=mesh,
        score=compile_rows("score", score, params),
        dots=compile_rows("grad_dots", dots, (params, two)),
        products=compile_rows("grad_products", products, (params, jax.eval_shape(signals_of, params, *others))),
        signals=compiler.compile(
            "signals",
            signals_of,
            *with_sharding((params, *others), replicated(mesh)),
            out_shardings=replicated(mesh),
        ),
        sums=compile_sums("sum_grads", sums, params),
        hessian=compile_sums("hessian_product", hessian, (params, params)) if curvature else None,
    )


@dataclass(frozen=True, kw_only=True)
class ChunkGradients:
    """Gradients of a split, summed up over chunks of examples of one class.

    Attributes:
        sums: of each chunk, flat, float32.
        classes: of each chunk.
        sizes: examples in each chunk.
        chunk_of: the chunk of each example of the split.
    """

    sums: Float[np.ndarray, "chunks parameters"]
    classes: Int[np.ndarray, " chunks"]
    sizes: Int[np.ndarray, " chunks"]
    chunk_of: Int[np.ndarray, " examples"]

    def products(self) -> Float[np.ndarray, "chunks chunks"]:
        """Return the inner products of the sums, float64."""
        found = np.zeros((len(self.sums), len(self.sums)))
        for start in range(0, self.sums.shape[1], 2**16):
            part = self.sums[:, start : start + 2**16].astype(np.float64)
            found += part @ part.T
        return found

    def squares(self, grad_norm: Float[np.ndarray, " examples"]) -> Float[np.ndarray, " chunks"]:
        """Return the sum of the squared norms over each chunk's examples, float64."""
        return np.bincount(self.chunk_of, weights=grad_norm.astype(np.float64) ** 2, minlength=len(self.sizes))

    def total(self) -> Float[np.ndarray, " parameters"]:
        """Return the summed gradient of the split."""
        return np.asarray(np.sum(self.sums, axis=0))

    def of_class(self, label: int) -> Float[np.ndarray, " parameters"]:
        """Return the summed gradient of a class."""
        return np.sum(self.sums[self.classes == label], axis=0)


def chunk_gradients(
    passes: GradientPasses,
    params: Params | HostParams,
    split: Split,
    num_classes: int,
    *,
    advance: Callable[[int], None],
) -> ChunkGradients:
    """Sum up the gradients of each class in some chunks: as many as memory allows for, 2 to 10 a class."""
    size = num_parameters(params)
    per_class = int(np.clip(_CHUNK_FLOATS // (size * num_classes), 2, _CHUNKS_PER_CLASS))
    sums: list[np.ndarray] = []
    classes, sizes, chunk_of = [], [], np.zeros(len(split), np.int64)
    for label in range(num_classes):
        members = np.flatnonzero(split.labels == label)
        if not len(members):
            continue
        parts = np.split(members, range(passes.sums.batch_size, len(members), passes.sums.batch_size))
        for group in np.array_split(np.arange(len(parts)), min(per_class, len(parts))):
            found = [_summed_grad(passes.sums, params, split, parts[index]) for index in group]
            rows = np.concatenate([parts[index] for index in group])
            chunk_of[rows] = len(sums)
            sums.append(np.sum(found, axis=0))
            classes.append(label)
            sizes.append(len(rows))
            advance(len(rows))
    return ChunkGradients(sums=np.stack(sums), classes=np.array(classes), sizes=np.array(sizes), chunk_of=chunk_of)


def _summed_grad(
    sums: Pass, params: Params | HostParams, split: Split, rows: np.ndarray
) -> Float[np.ndarray, " parameters"]:
    total, _ = sums.function(params, _filled(sums, split, rows))
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(total)])


def _filled(sums: Pass, split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a batch with these rows, and others that its mask leaves out."""
    filled = np.resize(rows, sums.batch_size)
    return split.images[filled], split.labels[filled], np.arange(sums.batch_size) < len(rows)


def mean_hessian_product(hessian: Pass, params: Params | HostParams, direction: Params, *, split: Split) -> Params:
    """Return the Hessian of the mean loss over a split times a direction."""
    total = jax.tree.map(jnp.zeros_like, params)
    for start in range(0, len(split), hessian.batch_size):
        rows = np.arange(start, min(start + hessian.batch_size, len(split)))
        total = jax.tree.map(jnp.add, total, hessian.function((params, direction), _filled(hessian, split, rows))[0])
    return jax.tree.map(lambda leaf: leaf / len(split), total)


def _compile_pass(
    model: Model,
    mesh: Mesh,
    compiler: Compiler,
    name: str,
    function: Callable,
    whole: Any,
    *,
    budget: int,
    at_least: int = 0,
    masked: bool = False,
) -> Pass:
    """Compile a function for the largest batch that fits into a budget; `masked`, it is told which rows count."""

    def compile_at(rows: int) -> CompiledFunction:
        count = rows * mesh.size
        mask = (jax.ShapeDtypeStruct((count,), bool),) if masked else ()
        batch = with_sharding((*_abstract_rows(model, count), *mask), over_batch(mesh))
        return compiler.compile(name, data_parallel(function, mesh), with_sharding(whole, replicated(mesh)), batch)

    function_at, rows = compile_within(budget, LARGEST_BATCH, compile_at, at_least=at_least)
    return Pass(function=function_at, batch_size=rows * mesh.size)


def _abstract_rows(model: Model, count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    images = jax.ShapeDtypeStruct((count, *model.config.image_shape), jnp.uint8)
    return images, jax.ShapeDtypeStruct((count,), jnp.int32)
