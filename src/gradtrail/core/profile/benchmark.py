"""Times of the functions of variants, and reference rates of the machine.

Training steps are timed without jit, one call each, and in one loop on the device; the other functions call by call.
Times are medians after a warm-up, from ready arguments to ready results, on random examples of the data set's shapes.
The caller passes the clock. Out of scope: whether a variant fits into memory.
"""

import functools
import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradtrail.core import batching
from gradtrail.core.profile.variants import CompiledVariant, ProfileConfig, Variant
from gradtrail.core.sharding import replicated
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.loop import Program
from gradtrail.core.train.step import TrainState
from gradtrail.core.xla.compiler import Compiler

_SIDE = 768  # rows of the matrices
_COPIED_BYTES = 32 * 2**20  # more than the caches of most processors
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Highest rates of the first local device, or of all cores of a CPU, at this moment."""

    flops_per_second: float  # rate of multiplying two float32 matrices of 768 × 768, counted as 2 n³ FLOPs
    bytes_per_second: float  # rate of negating 32 MiB in place, bytes read plus bytes written


def measure_rates(clock: Callable[[], float]) -> MachineRates:
    """Measure both rates as medians of three calls after a warm-up; `clock` returns seconds."""
    matrix = jnp.full((_SIDE, _SIDE), 1 / _SIDE, jnp.float32)  # equal to its square
    vector = jnp.ones(_COPIED_BYTES // 4, jnp.float32)
    return MachineRates(
        flops_per_second=2 * _SIDE**3 / _median_seconds(_square, matrix, clock),
        bytes_per_second=2 * _COPIED_BYTES / _median_seconds(_negate, vector, clock),
    )


@jax.jit
def _square(matrix: jax.Array) -> jax.Array:
    return matrix @ matrix


@functools.partial(jax.jit, donate_argnums=0)
def _negate(vector: jax.Array) -> jax.Array:  # in place: newly allocated memory is slower
    return -vector


def _median_seconds(function: Callable[[jax.Array], jax.Array], array: jax.Array, clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        started = clock()
        array = jax.block_until_ready(function(array))
        seconds.append(clock() - started)
    return statistics.median(seconds[1:])


ROUNDS = 9  # timings of each loop or call, for a median and its interval
_LEAST_ROUNDS = 6  # timings of a slow loop or call
_LEAST_STEPS = 2  # timed steps without jit
_WITHOUT_JIT = hashlib.sha256(b"a step without jit").hexdigest()  # program digest for the guard of a compiler
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class FunctionTime:
    """Time and rates of a function of a variant."""

    function: str
    variant: Variant
    # seconds of a call in each round, or of a step in the loop of `train_step`; each round times all functions,
    # interleaved
    rounds: tuple[float, ...]
    seconds: float  # the median of the rounds
    examples_per_second: float  # batch size over `seconds`
    flops_per_second: float  # static FLOPs of a call or step over `seconds`
    bytes_per_second: float  # `StaticCost.touched_bytes` over `seconds`
    arithmetic_intensity: float  # FLOPs per touched byte


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The same steps of the configured training run in three ways, in seconds per step."""

    without_jit: float  # seconds with each operation dispatched by itself
    steps_without_jit: int  # number of steps timed without jit
    steps_with_jit: int  # number of steps in each timing of the other two ways
    one_by_one: float  # seconds with one call of the compiled function per step, from a Python loop
    scanned: float  # seconds with one call for all steps, a loop on the device
    compile_seconds: float  # seconds of tracing, lowering and compiling the step

    @property
    def jit_speedup(self) -> float:
        """Speedup of a step by jit, called one by one."""
        return self.without_jit / self.one_by_one

    @property
    def scan_speedup(self) -> float:
        """Speedup of a step in the loop over single calls."""
        return self.one_by_one / self.scanned

    @property
    def steps_until_it_pays(self) -> float:
        """Number of steps from which on compiling saves time; infinity if it never does."""
        return steps_until_it_pays(self.compile_seconds, slow=self.without_jit, fast=self.one_by_one)


def steps_until_it_pays(overhead: float, *, slow: float, fast: float) -> float:
    """Return the least n ≥ 1 with overhead + n · fast ≤ n · slow; infinity if there is none."""
    if slow <= fast:
        return 1.0 if overhead <= 0 and slow == fast else math.inf
    return max(1.0, math.ceil(overhead / (slow - fast)))


def interleaved(
    calls: Sequence[Callable[[], Any]], clock: Clock, *, seconds: float, least: int, most: int
) -> list[list[float]]:
    """Return the seconds of repeated calls, interleaved so that other load on the machine affects all alike.

    Args:
        calls: functions that return arrays; a call ends when they are ready.
        clock: returns seconds.
        seconds: time budget of the repetitions of a call, the least ones aside.
        least: smallest number of repetitions, whatever the budget.
        most: largest number of repetitions.
    """
    timings: list[list[float]] = [[] for _ in calls]
    for turn in range(max(most, least)):
        for call, call_timings in zip(calls, timings, strict=True):
            if turn < least or sum(call_timings) < seconds:
                call_timings.append(_timed(call, clock))
    return timings


def _timed(call: Callable[[], Any], clock: Clock) -> float:
    started = clock()
    jax.block_until_ready(call())
    return clock() - started


class Bench:
    """Times compiled variants on random examples, from random states, without compiling anything.

    Args:
        compiler: compiler whose clock returns seconds and whose guard locks the compilation of a step's operations.
    """

    def __init__(self, config: ProfileConfig, num_classes: int, compiler: Compiler):
        self._config = config
        self._num_classes = num_classes
        self._compiler = compiler
        self._clock = compiler.clock
        self._examples: Examples | None = None

    def time_functions(self, variants: Sequence[CompiledVariant]) -> list[FunctionTime]:
        """Time each function of each variant, interleaved."""
        works = [(variant, name, self._work(variant, name)) for variant in variants for name in variant.functions]
        counts = [self._fitting(work) for *_, work in works]
        rounds = [functools.partial(work, count) for (*_, work), count in zip(works, counts, strict=True)]
        return [
            _function_time(variant, name, tuple(seconds / count for seconds in round_seconds))
            for (variant, name, _), round_seconds, count in zip(works, self._interleaved(rounds), counts, strict=True)
        ]

    def time_steps(self, compiled: CompiledVariant) -> StepTimes:
        """Time the same training steps in three ways."""
        without_jit = self._time_without_jit(compiled)
        loop = self._loop(compiled)
        count = self._fitting(loop.scanned)
        ways = (functools.partial(loop.one_by_one, count), functools.partial(loop.scanned, count))
        one_by_one, scanned = map(statistics.median, self._interleaved(ways))
        return StepTimes(
            without_jit=statistics.median(without_jit),
            steps_without_jit=len(without_jit),
            steps_with_jit=count,
            one_by_one=one_by_one / count,
            scanned=scanned / count,
            compile_seconds=compiled.functions["train_step"].times.total_seconds,
        )

    def _work(self, compiled: CompiledVariant, name: str) -> Callable[[int], Any]:
        """Return a function of a count that makes this number of calls, or of steps of the loop."""
        loop = self._loop(compiled)
        if name == "train_step":
            return loop.scanned
        arguments = jax.device_put((loop.state.params, *loop.batch()), jax.local_devices()[0])  # compiled for it
        return lambda count: [jax.block_until_ready(compiled.functions[name](*arguments)) for _ in range(count)][-1]

    def _fitting(self, work: Callable[[int], Any]) -> int:
        """Warm up; return the number of calls or steps of one timing."""
        work(1)
        count = 1
        while True:  # a few calls predict the time of many better than one does
            elapsed = _timed(functools.partial(work, count), self._clock)
            fitting = int(count * self._config.seconds / ROUNDS / elapsed) if elapsed > 0 else self._config.steps
            fitting = max(1, min(self._config.steps, fitting))
            if fitting <= 4 * count:
                return fitting
            count *= 4

    def _interleaved(
        self, calls: Sequence[Callable[[], Any]], *, least: int = _LEAST_ROUNDS, most: int = ROUNDS
    ) -> list[list[float]]:
        return interleaved(calls, self._clock, seconds=self._config.seconds, least=least, most=most)

    def _time_without_jit(self, compiled: CompiledVariant) -> list[float]:
        """Return the seconds of each step after the first one."""
        loop = self._loop(compiled)
        with jax.disable_jit():
            with self._compiler.guard(_WITHOUT_JIT):
                loop.step_without_jit()  # compiles each operation by itself, or reads it from the cache
            (step_seconds,) = self._interleaved([loop.step_without_jit], least=_LEAST_STEPS, most=self._config.steps)
        return step_seconds

    def _loop(self, compiled: CompiledVariant) -> "_Loop":
        program = compiled.program
        everywhere = replicated(program.mesh)
        if self._examples is None:
            self._examples = jax.block_until_ready(jax.device_put(self._random_examples(program), everywhere))
        state = jax.device_put(random_state(program), everywhere)
        order = jax.device_put(_order(len(self._examples.labels), compiled), everywhere)
        return jax.block_until_ready(_Loop(compiled, state, self._examples, order))

    def _random_examples(self, program: Program) -> Examples:
        rng, shape = np.random.default_rng(0), program.examples.images.shape
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        return Examples(images=images, labels=rng.integers(0, self._num_classes, shape[0], dtype=np.int32))


class _Loop:
    """An endless training over one order of random examples; every call continues from the last state."""

    def __init__(self, compiled: CompiledVariant, state: TrainState, examples: Examples, order: Array):
        self.program = compiled.program
        self.state = state
        self._run = compiled.functions["train_step"]
        self._examples = examples
        self._order = order
        self._records = jax.device_put(self.program.records(), replicated(self.program.mesh))
        self._done = 0

    def batch(self) -> tuple[Array, Array]:
        """Return images and labels of one batch."""
        rows = np.asarray(self._order[0])
        rows = rows[rows != batching.PADDING]
        return jax.block_until_ready((self._examples.images[rows], self._examples.labels[rows]))

    def scanned(self, count: int) -> Array:
        """Make steps in one call per epoch; return an array that becomes ready with the last step."""
        length = self.program.steps_per_epoch
        for start in range(0, count, length):
            self._call(self._run, 0, min(length, count - start))
        return self.state.step

    def one_by_one(self, count: int) -> Array:
        """Make the same steps in one call each, without waiting in between."""
        for index in range(count):
            start = index % self.program.steps_per_epoch
            self._call(self._run.call, start, start + 1)
        return self.state.step

    def _call(self, run: Callable[..., Any], start: int, stop: int) -> None:
        arguments = (self._examples, self._order, np.int32(start), np.int32(stop))
        self.state, self._records = run(self.state, self._records, *arguments)

    def step_without_jit(self) -> Array:
        """Make the next step; called under `jax.disable_jit`."""
        index = np.int32(self._done % self.program.steps_per_epoch)
        state, records = self.program.recorded_step(self.state, self._records, self._examples, self._order, index)
        self.state, self._records = jax.block_until_ready((state, records))
        self._done += 1
        return self.state.step


def random_state(program: Program) -> TrainState:
    """Return a state of small positive numbers with finite roots and logarithms: NaN may change the time."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if np.issubdtype(leaf.dtype, np.floating):
            return rng.uniform(1e-3, 0.02, leaf.shape).astype(leaf.dtype)
        return np.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(draw, program.abstract_state)


def _function_time(compiled: CompiledVariant, name: str, rounds: tuple[float, ...]) -> FunctionTime:
    cost = compiled.functions[name].cost
    seconds = statistics.median(rounds)
    return FunctionTime(
        function=name,
        variant=compiled.variant,
        rounds=rounds,
        seconds=seconds,
        examples_per_second=compiled.variant.batch_size / seconds,
        flops_per_second=cost.flops / seconds,
        bytes_per_second=cost.touched_bytes / seconds,
        arithmetic_intensity=cost.flops / max(cost.touched_bytes, 1),
    )


def _order(num_examples: int, compiled: CompiledVariant) -> np.ndarray:
    """Return the batches of an epoch in random order; the last one is filled up, so that all take the same time.

    Batches of a private training have its mean size, padded to its capacity.
    """
    program, batch_size = compiled.program, compiled.variant.batch_size
    shuffled = np.random.default_rng(0).permutation(num_examples).astype(np.int32)
    batches = np.resize(shuffled, (program.steps_per_epoch, batch_size))
    rows = program.records().rows
    room = rows.indices.shape[1] if rows else batch_size
    return np.pad(batches, ((0, 0), (0, room - batch_size)), constant_values=batching.PADDING)
