"""The passes over a data set that an analysis of gradients consists of, each compiled once, for a single device.

Microbatch sizes follow from the network and the kind of device, by fixed budgets of memory: no setting of the machine
changes them, and so none changes a result.
"""

import functools
from dataclasses import dataclass, replace

import jax
from jaxtyping import Array

from gradtrail.core import per_example
from gradtrail.core.gradients.curvature import EXAMPLES, hessian_product
from gradtrail.core.gradients.scores import compile_score, score_and_sum
from gradtrail.core.nn.inference import abstract_batch
from gradtrail.core.nn.losses import Loss
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass, compile_within

_LARGEST_BATCH = {"cpu": 512, "gpu": 4096}  # kind of device → largest number of examples in a microbatch
_FEWEST_SUMMED = 8  # smallest microbatch of a sum, whatever its memory


@dataclass(frozen=True, kw_only=True)
class GradientPasses:
    """The compiled passes."""

    score: Pass  # rows: the scores of `score_batch`
    dots: Pass  # shared: two directions; row `dots`: inner products of the example's gradient with both
    sums: Pass  # its function, `score_and_sum`, takes a mask after the labels
    hessian: Pass  # its function, `hessian_product` in float32, takes a vector, images, labels and a mask

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [compiled.function for compiled in (self.score, self.dots, self.sums, self.hessian)]


def compile_passes(model: Model, loss: Loss, *, compiler: Compiler) -> GradientPasses:
    """Compile all passes for microbatches of at most 512 examples whose temporary arrays take at most 30 MiB.

    A single example may take more, and so may the 8 examples of a sum.
    """
    params = model.abstract_params()
    two = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), params)

    def dots(params: Params, directions: Params, images: Array, labels: Array) -> dict[str, Array]:
        rows = per_example.grad_dots(model, params, images, labels, directions, loss=loss)
        return {"dots": rows}

    def compile_dots(rows: int) -> CompiledFunction:
        return compiler.compile("grad_dots", dots, params, two, *abstract_batch(model, rows))

    def compile_sums(rows: int) -> CompiledFunction:
        function = functools.partial(score_and_sum, model, loss=loss)
        mask = jax.ShapeDtypeStruct((rows,), bool)
        return compiler.compile("score_and_sum", function, params, *abstract_batch(model, rows), mask)

    def compile_hessian(rows: int) -> CompiledFunction:
        function = functools.partial(hessian_product, exact, loss=loss)
        mask = jax.ShapeDtypeStruct((rows,), bool)
        return compiler.compile("hessian_product", function, params, params, *abstract_batch(model, rows), mask)

    exact = Model(replace(model.config, precision="float32"))  # a lower precision has no second derivatives
    largest = _LARGEST_BATCH["cpu" if jax.default_backend() == "cpu" else "gpu"]

    return GradientPasses(
        score=compile_within(largest, lambda rows: compile_score(model, loss, rows, compiler=compiler)),
        dots=compile_within(largest, compile_dots),
        sums=compile_within(largest, compile_sums, at_least=_FEWEST_SUMMED),
        hessian=compile_within(min(largest, EXAMPLES), compile_hessian),
    )
