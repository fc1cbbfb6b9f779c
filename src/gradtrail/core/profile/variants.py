"""What the configured training costs in other forms, by the compiler's account alone: precision, batch size, remat."""

import dataclasses
from dataclasses import dataclass

import jax

from gradtrail.core.common.sharding import make_mesh
from gradtrail.core.common.validation import check
from gradtrail.core.gradients.scores import compile_score
from gradtrail.core.nn.inference import compile_predict
from gradtrail.core.nn.models import Model
from gradtrail.core.nn.precision import Precision
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import Program, compile_run_steps, make_program
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

_LARGEST_BATCH_SIZE = 2**30


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The section `profile` of `params.yaml`.

    Attributes:
        precisions: to compare.
        smallest_batch_size: the powers of two from here on are compared.
        largest_batch_size: up to here.
        steps: that are timed in each way of making them.
        seconds: that a timing takes at most, two calls at least; where fewer of `steps` fit, fewer are timed.
    """

    precisions: tuple[Precision, ...]
    smallest_batch_size: int
    largest_batch_size: int
    steps: int
    seconds: float

    def __post_init__(self) -> None:
        check("precisions: number of entries", len(self.precisions), at_least=1)
        check("smallest_batch_size", self.smallest_batch_size, at_least=1, at_most=_LARGEST_BATCH_SIZE)
        first = 1 << (self.smallest_batch_size - 1).bit_length()  # the first power of two that is not below it
        check("largest_batch_size", self.largest_batch_size, at_least=first)
        check("steps", self.steps, at_least=2)
        check("seconds", self.seconds, above=0)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The powers of two between the bounds, both included."""
        powers = (1 << exponent for exponent in range(self.largest_batch_size.bit_length()))
        return tuple(power for power in powers if self.smallest_batch_size <= power <= self.largest_batch_size)


@dataclass(frozen=True, kw_only=True, order=True)
class Variant:
    """A form of the training.

    Attributes:
        remat: whether the backward pass computes activations again in place of keeping them.
    """

    precision: Precision
    batch_size: int
    remat: bool

    @classmethod
    def of(cls, config: TrainConfig) -> "Variant":
        """Return the form that a training is configured for."""
        return cls(precision=config.precision, batch_size=config.batch_size, remat=config.remat)

    @property
    def label(self) -> str:
        """For people: `float32, batch of 128, remat`."""
        return f"{self.precision}, batch of {self.batch_size}{', remat' if self.remat else ''}"


@dataclass(frozen=True, kw_only=True)
class CompiledVariant:
    """The functions of one variant.

    Attributes:
        program: of the training, on one device.
        functions: compiled, by name: `train_step`, and `predict` and `score` where there are others than configured.
    """

    variant: Variant
    program: Program
    functions: dict[str, CompiledFunction]

    def touched_bytes(self, name: str) -> int:
        """Return the bytes that a call of a function reads and writes.

        By the account of XLA for CPUs a step that gathers its batch reads the whole split; here it reads the batch.
        """
        accessed = self.functions[name].cost.bytes_accessed
        if name != "train_step" or jax.default_backend() != "cpu":
            return accessed
        leaves = jax.tree.leaves(self.program.examples)
        num_examples = leaves[0].shape[0]
        left_out = max(0, num_examples - self.variant.batch_size)
        return max(0, accessed - left_out * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // num_examples)


def variants_to_compare(config: ProfileConfig, train_config: TrainConfig) -> list[Variant]:
    """Return the configured variant first, then those that differ from it in one respect, each once.

    Batch sizes that `accumulation_steps` does not divide are left out.
    """
    configured = Variant.of(train_config)
    sizes = [size for size in config.batch_sizes if size % train_config.accumulation_steps == 0]
    others = {dataclasses.replace(configured, precision=precision) for precision in config.precisions}
    others |= {dataclasses.replace(configured, batch_size=size) for size in sizes}
    others |= {dataclasses.replace(configured, remat=not configured.remat)}
    return [configured, *sorted(others - {configured})]


def compile_variant(
    config: TrainConfig,
    variant: Variant,
    *,
    image_shape: tuple[int, int],
    num_classes: int,
    num_examples: int,
    compiler: Compiler,
) -> CompiledVariant:
    """Compile the training step on shapes alone; with the configured batch size and remat, prediction and scores too.

    Those two know nothing of remat, and their batches are not the training's: `evaluate.batch_size` and
    `runtime.memory_budget_mib` decide.

    Args:
        config: the training; what the variant says stands in the place of its own.
        variant: the configured one, or another.
        num_examples: size of the training split.
        compiler: counts the functions of the configured variant as its own; for others it is only the clock and the
            guard.
    """
    only_the_step = (variant.batch_size, variant.remat) != (config.batch_size, config.remat)
    if variant != Variant.of(config):
        compiler = Compiler(compiler.clock, compiler.guard)
    config = dataclasses.replace(config, **dataclasses.asdict(variant))
    model = Model(config.model_config(image_shape, num_classes), remat=config.remat)
    one_device = make_mesh(jax.local_devices()[:1])  # on which every batch size is possible
    program = make_program(config, model, num_examples, one_device)
    functions = [compile_run_steps(program, compiler=compiler)]
    if not only_the_step:
        functions.append(compile_predict(model, config.batch_size, compiler=compiler))
        functions.append(compile_score(model, config.label_smoothing, config.batch_size, compiler=compiler))
    named = {function.name: function for function in functions}
    return CompiledVariant(variant=variant, program=program, functions=named)
