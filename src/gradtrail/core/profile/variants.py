"""Static costs of the configured training and of its variants in precision, batch size and rematerialization."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from gradtrail.core.common.validation import POSITIVE, check, check_fields
from gradtrail.core.gradients.scores import compile_score
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.inference import compile_predict
from gradtrail.core.nn.models import Model
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.loop import Program, make_program
from gradtrail.core.train.privacy import placeholder_noise
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

_LARGEST_BATCH_SIZE = 2**30


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The section `profile` of `params.yaml`."""

    precisions: tuple[Precision, ...]  # precisions to compare with the configured one
    smallest_batch_size: int  # lower bound of the powers of two that are compared
    largest_batch_size: int  # upper bound, included
    steps: int  # largest number of training steps per timing
    # time budget of a timing, which has at least six rounds, or two steps without jit, and fewer steps than `steps`
    # if they do not fit
    seconds: float

    def __post_init__(self) -> None:
        check("precisions: number of entries", len(self.precisions), at_least=1)
        check_fields(self, smallest_batch_size={"at_least": 1, "at_most": _LARGEST_BATCH_SIZE})
        first = 1 << (self.smallest_batch_size - 1).bit_length()  # the first power of two that is not below it
        check_fields(
            self,
            largest_batch_size={"at_least": first, "at_most": _LARGEST_BATCH_SIZE},
            steps={"at_least": 2, "at_most": 1_000_000},
            seconds=POSITIVE,
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The powers of two between the bounds, both included."""
        powers = (1 << exponent for exponent in range(self.largest_batch_size.bit_length()))
        return tuple(power for power in powers if self.smallest_batch_size <= power <= self.largest_batch_size)


@dataclass(frozen=True, kw_only=True, order=True)
class Variant:
    """A training step in one precision, with one batch size."""

    precision: Precision
    batch_size: int
    remat: bool  # True if the backward pass recomputes activations instead of storing them

    @classmethod
    def from_config(cls, config: TrainConfig) -> "Variant":
        """Return the variant that a training is configured for."""
        return cls(precision=config.precision, batch_size=config.batch_size, remat=config.remat)

    @property
    def label(self) -> str:
        """Readable name, such as `float32, batch of 128, remat`."""
        return f"{self.precision}, batch of {self.batch_size}{', remat' if self.remat else ''}"


@dataclass(frozen=True, kw_only=True)
class CompiledVariant:
    """The compiled functions of one variant."""

    variant: Variant
    program: Program  # the training, over `shards` devices; its cost is that of one of them
    # `train_step`; also `predict` and `score` if batch size and remat are the configured ones
    functions: dict[str, CompiledFunction]


def variants_to_compare(config: ProfileConfig, train_config: TrainConfig) -> list[Variant]:
    """Return the configured variant, then every variant that differs from it in one respect.

    Batch sizes that are no multiple of `accumulation_steps` times `shards` are left out.
    A private training has neither rematerialization nor float16 to compare with.
    """
    configured = Variant.from_config(train_config)
    parts = train_config.accumulation_steps * train_config.shards
    sizes = [size for size in config.batch_sizes if size % parts == 0]
    is_private = train_config.privacy.enabled
    precisions = [kind for kind in config.precisions if not (is_private and kind == "float16")]
    alternatives = {dataclasses.replace(configured, precision=precision) for precision in precisions}
    alternatives |= {dataclasses.replace(configured, batch_size=size) for size in sizes}
    if not is_private:
        alternatives |= {dataclasses.replace(configured, remat=not configured.remat)}
    return [configured, *sorted(alternatives - {configured})]


def compile_variant(
    config: TrainConfig,
    variant: Variant,
    *,
    image_shape: tuple[int, int],
    num_classes: int,
    num_examples: int,
    devices: Sequence[jax.Device],
    compiler: Compiler,
) -> CompiledVariant:
    """Compile the functions of a variant on abstract arguments, all for the batch size of the variant.

    Prediction and scoring run on one device, do not depend on `remat` and are compiled for the configured batch size
    only.

    Args:
        config: the training, whose fields `variant` replaces.
        num_examples: size of the training split.
        devices: `config.shards` devices or more, see `make_program`.
        compiler: compiler whose `functions` get those of the configured variant only.
    """
    only_the_step = (variant.batch_size, variant.remat) != (config.batch_size, config.remat)
    if variant != Variant.from_config(config):
        compiler = compiler.for_variant(variant.label)
    config = dataclasses.replace(config, **dataclasses.asdict(variant))
    model = Model(config.model_config(image_shape, num_classes), remat=config.remat)
    program = make_program(config, model, num_examples, devices, placeholder_noise(config.privacy))
    functions = [program.compile_run_steps(compiler)]
    if not only_the_step:
        functions.append(compile_predict(model, config.batch_size, compiler=compiler))
        functions.append(compile_score(model, config.label_smoothing, config.batch_size, compiler=compiler))
    by_name = {function.name: function for function in functions}
    return CompiledVariant(variant=variant, program=program, functions=by_name)
