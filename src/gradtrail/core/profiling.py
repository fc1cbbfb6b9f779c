"""What the configured training costs at other precisions and batch sizes, by the compiler's account alone."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gradtrail.core.bounds import check
from gradtrail.core.compilation import CompiledFunction
from gradtrail.core.prediction import compile_predict
from gradtrail.core.models import Model
from gradtrail.core.per_example_gradients import compile_score
from gradtrail.core.precision import Precision
from gradtrail.core.training import Examples, TrainConfig, compile_run_steps, make_program


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The section `profile` of `params.yaml`.

    Attributes:
        precisions: to compare.
        batch_sizes: to compare; the same sizes serve training, prediction and scoring.
    """

    precisions: tuple[Precision, ...]
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        check("precisions: number of entries", len(self.precisions), at_least=1)
        check("batch_sizes: number of entries", len(self.batch_sizes), at_least=1)
        for batch_size in self.batch_sizes:
            check("batch_sizes", batch_size, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Functions of one precision and batch size, compiled."""

    precision: Precision
    batch_size: int
    functions: list[CompiledFunction]


def compile_variant(
    config: TrainConfig,
    precision: Precision,
    batch_size: int,
    *,
    image_shape: tuple[int, int],
    num_classes: int,
    num_examples: int,
    clock: Callable[[], float],
) -> Variant:
    """Compile training step, prediction and per-example scores, on shapes alone.

    Args:
        config: the training; its own precision and batch size are replaced.
        num_examples: size of the training split.
        clock: returns seconds, for the compile times.
    """
    config = dataclasses.replace(config, precision=precision, batch_size=batch_size)
    model = Model(config.model_config(image_shape, num_classes))
    examples = Examples(
        images=jax.ShapeDtypeStruct((num_examples, *image_shape), jnp.uint8),
        labels=jax.ShapeDtypeStruct((num_examples,), jnp.int32),
    )
    run_steps = compile_run_steps(make_program(config, model, num_examples), examples, clock=clock)
    predict = compile_predict(model, batch_size, clock=clock)
    score = compile_score(model, config.label_smoothing, batch_size, clock=clock)
    return Variant(precision=precision, batch_size=batch_size, functions=[run_steps, predict, score])
