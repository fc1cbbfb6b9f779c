"""Variants of the configured training in precision, batch size and rematerialization: static costs and times.

Times are medians of interleaved rounds after a warm-up, from ready arguments to ready results, on random examples of
the data set's shapes. The caller passes the clock. Out of scope: whether a variant fits into memory.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradtrail.core import batching
from gradtrail.core.config import Bounds, Positive, config
from gradtrail.core.gradients.scores import compile_score
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.inference import compile_predict
from gradtrail.core.nn.models import Model
from gradtrail.core.sharding import replicated
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.loop import TrainingFunctions
from gradtrail.core.train.privacy import placeholder_noise
from gradtrail.core.train.step import TrainState
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

ROUNDS = 9  # timings of each function, for a median and its interval
_FEWEST_ROUNDS = 6  # timings of a slow function
_BatchSize = Annotated[int, Bounds(at_least=1, at_most=2**30)]


@config
class ProfileConfig:
    """The section `profile` of `params.yaml`."""

    precisions: tuple[Precision, ...]  # precisions to compare with the configured one
    smallest_batch_size: _BatchSize  # lower bound of the powers of two that are compared
    largest_batch_size: _BatchSize  # upper bound, included
    steps: Annotated[int, Bounds(at_least=2, at_most=1_000_000)]  # largest number of training steps per round
    seconds: Positive  # time for the rounds of a function; a slow one has six rounds, whatever they take

    def check(self) -> None:
        """Raise ValueError if there is no precision, or no power of two between the bounds."""
        Bounds(at_least=1).check("precisions: number of entries", len(self.precisions))
        first = 1 << (self.smallest_batch_size - 1).bit_length()  # the first power of two that is not below it
        Bounds(at_least=first).check("largest_batch_size", self.largest_batch_size)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The powers of two between the bounds, both included."""
        powers = (1 << exponent for exponent in range(self.largest_batch_size.bit_length()))
        return tuple(power for power in powers if power >= self.smallest_batch_size)


@dataclass(frozen=True, kw_only=True, order=True)
class Variant:
    """A training step in one precision, with one batch size."""

    precision: Precision
    batch_size: int
    remat: bool  # True if the backward pass recomputes activations instead of storing them

    @property
    def label(self) -> str:
        """Readable name, such as `float32, batch of 128, remat`."""
        return f"{self.precision}, batch of {self.batch_size}{', remat' if self.remat else ''}"


@dataclass(frozen=True, kw_only=True)
class CompiledVariant:
    """The compiled functions of one variant."""

    variant: Variant
    model: Model
    training: TrainingFunctions  # over `shards` devices; its cost is that of one of them
    functions: dict[str, CompiledFunction]  # `train_step`; of the configured variant also `predict` and `score`


@dataclass(frozen=True, kw_only=True)
class FunctionTime:
    """Time of a function of a variant, as the stages run it: `train_step` in a loop on the device."""

    function: str
    variant: Variant
    rounds: tuple[float, ...]  # seconds of a call or step in each round; a round times all functions in turn

    @property
    def seconds(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Highest rates of the first local device, or of all cores of a CPU, at this moment."""

    flops_per_second: float  # rate of multiplying two float32 matrices of 768 × 768, counted as 2 n³ FLOPs
    bytes_per_second: float  # rate of negating 32 MiB in place, bytes read plus bytes written


def configured_variant(train_config: TrainConfig) -> Variant:
    """Return the variant that a training is configured for."""
    return Variant(precision=train_config.precision, batch_size=train_config.batch_size, remat=train_config.remat)


def variants_to_compare(config: ProfileConfig, train_config: TrainConfig, num_examples: int) -> list[Variant]:
    """Return the configured variant, then every variant that differs from it in one respect.

    Batch sizes above the number of training examples, and those that are no multiple of `accumulation_steps` times
    `shards`, are left out. A private training has neither
    rematerialization nor float16 to compare with, and only convolutional blocks are rematerialized.
    """
    configured = configured_variant(train_config)
    parts = train_config.accumulation_steps * train_config.shards
    is_private = train_config.privacy.enabled
    alternatives = {
        dataclasses.replace(configured, precision=precision)
        for precision in config.precisions
        if not (is_private and precision == "float16")
    }
    sizes = (size for size in config.batch_sizes if size % parts == 0 and size <= num_examples)
    alternatives |= {dataclasses.replace(configured, batch_size=size) for size in sizes}
    if train_config.model.kind in ("cnn", "resnet") and not is_private:
        alternatives |= {dataclasses.replace(configured, remat=not configured.remat)}
    return [configured, *sorted(alternatives - {configured})]


def compile_variant(
    train_config: TrainConfig,
    variant: Variant,
    *,
    image_shape: tuple[int, ...],
    num_classes: int,
    num_examples: int,
    compiler: Compiler,
) -> CompiledVariant:
    """Compile the training step of a variant on abstract arguments; of the configured one also `predict` and `score`.

    The configured step is the program of a training on `num_examples` examples: after that training it comes from the
    cache. Prediction and scoring run on one device and take the configured batch size.

    Args:
        compiler: compiler whose `functions` get those of the configured variant only.
    """
    is_configured = variant == configured_variant(train_config)
    if not is_configured:
        compiler = compiler.for_variant(variant.label)
    train_config = dataclasses.replace(train_config, **dataclasses.asdict(variant))
    model = Model(train_config.model_config(image_shape, num_classes), remat=train_config.remat)
    noise = placeholder_noise(train_config.privacy)
    training = TrainingFunctions(train_config, model, num_examples, jax.local_devices(), noise)
    functions = [training.compile_run_steps(compiler)]
    if is_configured:
        batch_size, loss = train_config.batch_size, train_config.loss
        functions.append(compile_predict(model, batch_size, compiler=compiler))
        functions.append(compile_score(model, loss, batch_size, compiler=compiler))
    by_name = {function.name: function for function in functions}
    return CompiledVariant(variant=variant, model=model, training=training, functions=by_name)


def time_variants(
    compiled: Sequence[CompiledVariant], config: ProfileConfig, num_classes: int, clock: Callable[[], float]
) -> list[FunctionTime]:
    """Time each function of the variants, of which the configured one is the first; `clock` returns seconds."""
    configured, training = compiled[0], compiled[0].training
    examples = _random_examples(training, num_classes)
    on_devices = jax.device_put(examples, replicated(training.mesh))
    batch = np.resize(np.arange(len(examples.labels)), configured.variant.batch_size)
    arguments = jax.device_put(
        (random_state(training).params, examples.images[batch], examples.labels[batch]), jax.local_devices()[0]
    )
    runs: list[tuple[str, Variant, Callable[[int], Any]]] = []
    for variant in compiled:
        for name, function in variant.functions.items():
            is_step = name == "train_step"
            run = _Loop(variant, on_devices) if is_step else functools.partial(_repeat, function, arguments)
            runs.append((name, variant.variant, run))
    counts = [_fitting(run, config, clock) for *_, run in runs]
    calls = [functools.partial(run, count) for (*_, run), count in zip(runs, counts, strict=True)]
    timings = interleaved(calls, clock, seconds=config.seconds)
    return [
        FunctionTime(function=name, variant=variant, rounds=tuple(seconds / count for seconds in rounds))
        for (name, variant, _), count, rounds in zip(runs, counts, timings, strict=True)
    ]


def interleaved(calls: Sequence[Callable[[], Any]], clock: Callable[[], float], *, seconds: float) -> list[list[float]]:
    """Return the seconds of repeated calls, interleaved so that other load on the machine affects all alike.

    Args:
        calls: functions that return arrays; a call ends when they are ready.
        clock: returns seconds.
        seconds: time for the rounds of a call: those after the sixth are left out if it is used up.
    """
    timings: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS):
        for call, call_timings in zip(calls, timings, strict=True):
            if turn < _FEWEST_ROUNDS or sum(call_timings) < seconds:
                call_timings.append(_timed(call, clock))
    return timings


def _timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    started = clock()
    jax.block_until_ready(call())
    return clock() - started


def _fitting(run: Callable[[int], Any], config: ProfileConfig, clock: Callable[[], float]) -> int:
    """Warm up; return the number of calls or steps of one round."""
    run(1)
    count = 1
    while True:  # a few calls predict the time of many better than one does
        elapsed = _timed(functools.partial(run, count), clock)
        fitting = int(count * config.seconds / ROUNDS / elapsed) if elapsed > 0 else config.steps
        fitting = max(1, min(config.steps, fitting))
        if fitting <= 4 * count:
            return fitting
        count *= 4


def _repeat(function: Callable[..., Any], arguments: Sequence[Any], count: int) -> Any:
    return [jax.block_until_ready(function(*arguments)) for _ in range(count)][-1]


class _Loop:
    """An endless training over one order of random examples; every call continues from the last state."""

    def __init__(self, compiled: CompiledVariant, examples: Examples):
        training = compiled.training
        order = _order(len(examples.labels), compiled)
        fresh = (random_state(training), training.empty_records(), order)
        self._state, self._records, self._order = jax.device_put(fresh, replicated(training.mesh))
        self._examples = examples
        self._run = compiled.functions["train_step"]
        self._length = training.steps_per_epoch

    def __call__(self, count: int) -> Array:
        """Make steps in one call per epoch; return an array that becomes ready with the last step."""
        for start in range(0, count, self._length):
            stop = min(self._length, count - start)
            arguments = (self._examples, self._order, np.int32(0), np.int32(stop))
            self._state, self._records = self._run(self._state, self._records, *arguments)
        return self._state.step


def _random_examples(training: TrainingFunctions, num_classes: int) -> Examples:
    rng, shape = np.random.default_rng(0), training.abstract_examples.images.shape
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    return Examples(images=images, labels=rng.integers(0, num_classes, shape[0], dtype=np.int32))


def random_state(training: TrainingFunctions) -> TrainState:
    """Return a state of small positive numbers with finite roots and logarithms: NaN may change the time."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if np.issubdtype(leaf.dtype, np.floating):
            return rng.uniform(1e-3, 0.02, leaf.shape).astype(leaf.dtype)
        return np.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(draw, training.abstract_state)


def _order(num_examples: int, compiled: CompiledVariant) -> np.ndarray:
    """Return the batches of an epoch in random order; the last one is filled up, so that all take the same time.

    Batches of a private training have its mean size, padded to its capacity.
    """
    training, batch_size = compiled.training, compiled.variant.batch_size
    shuffled = np.random.default_rng(0).permutation(num_examples).astype(np.int32)
    batches = np.resize(shuffled, (training.steps_per_epoch, batch_size))
    rows = training.empty_records().rows
    padding = rows.indices.shape[1] - batch_size if rows else 0
    return np.pad(batches, ((0, 0), (0, padding)), constant_values=batching.PADDING)


def measure_rates(clock: Callable[[], float]) -> MachineRates:
    """Measure both rates by the fastest of six calls after a warm-up; `clock` returns seconds."""
    side, size = 768, 32 * 2**20  # rows of the matrices; bytes, more than the caches of most processors
    matrix = jnp.full((side, side), 1 / side, jnp.float32)  # equal to its square
    vector = jnp.ones(size // 4, jnp.float32)
    return MachineRates(
        flops_per_second=2 * side**3 / _shortest_time(_square, matrix, clock),
        bytes_per_second=2 * size / _shortest_time(_negate, vector, clock),
    )


_square = jax.jit(lambda matrix: matrix @ matrix)
_negate = jax.jit(jnp.negative, donate_argnums=0)  # in place: newly allocated memory is slower


def _shortest_time(function: Callable[[Array], Array], array: Array, clock: Callable[[], float]) -> float:
    """Return the time without other load, which can only make a call slower."""
    seconds = []
    for _ in range(7):
        started = clock()
        array = jax.block_until_ready(function(array))
        seconds.append(clock() - started)
    return min(seconds[1:])
