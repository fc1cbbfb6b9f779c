"""What the configured training costs at other precisions and batch sizes, by the compiler's account alone."""

import dataclasses
import itertools
from dataclasses import dataclass

import jax

from gradtrail.core.bounds import check
from gradtrail.core.compilation import CompiledFunction, Compiler
from gradtrail.core.data_parallel import make_mesh
from gradtrail.core.models import Model
from gradtrail.core.precision import Precision
from gradtrail.core.prediction import compile_predict
from gradtrail.core.scores import compile_score
from gradtrail.core.train_config import TrainConfig
from gradtrail.core.training import compile_run_steps, make_program


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

    @property
    def named_functions(self) -> list[CompiledFunction]:
        """The functions under names that tell the variant."""
        suffix = f"{self.precision}_{self.batch_size}"
        return [dataclasses.replace(function, name=f"{function.name}_{suffix}") for function in self.functions]


def variants_to_compile(config: ProfileConfig, train_config: TrainConfig) -> list[tuple[Precision, int]]:
    """Return precision and batch size of each variant: those to compare, and the configured one, in a fixed order."""
    configured = (train_config.precision, train_config.batch_size)
    return sorted({configured, *itertools.product(config.precisions, config.batch_sizes)})


def compile_variant(
    config: TrainConfig,
    precision: Precision,
    batch_size: int,
    *,
    image_shape: tuple[int, int],
    num_classes: int,
    num_examples: int,
    compiler: Compiler,
) -> Variant:
    """Compile training step, prediction and per-example scores, on shapes alone.

    Args:
        config: the training; its own precision and batch size are replaced.
        num_examples: size of the training split.
        compiler: that compiles them.
    """
    config = dataclasses.replace(config, precision=precision, batch_size=batch_size)
    model = Model(config.model_config(image_shape, num_classes), remat=config.remat)
    one_device = make_mesh(jax.local_devices()[:1])  # on which every batch size is possible
    run_steps = compile_run_steps(make_program(config, model, num_examples, one_device), compiler=compiler)
    predict = compile_predict(model, batch_size, compiler=compiler)
    score = compile_score(model, config.label_smoothing, batch_size, compiler=compiler)
    return Variant(precision=precision, batch_size=batch_size, functions=[run_steps, predict, score])
