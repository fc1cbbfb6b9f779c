"""Compiles functions ahead of time, and keeps what that took, what the results cost, and how long their calls take.

Knows nothing of stages; the caller hands in the clock. Costs come from the compiler, on abstract arguments, and are the
same on every run of one version on one kind of processor; times are not, and are kept apart.
"""

import contextlib
import dataclasses
import hashlib
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gradtrail.core.common.validation import ConfigError
from gradtrail.core.xla.compile_events import asked_for, cache_hits
from gradtrail.core.xla.loop_costs import count_equations, repeated_costs

WATCHED = ("flops", "bytes_accessed", "total_bytes", "hlo_instructions")
TIMED_CALLS = 12  # of each function: the first one, and others for a median
Guard = Callable[[str], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class StaticCost:
    """What one call costs by the compiler's account.

    A loop whose length the compiler knows counts as often as it is passed; one whose bounds are arguments counts once.

    Attributes:
        flops: floating-point operations.
        transcendentals: exponentials, logarithms and the like.
        bytes_accessed: bytes read and written.
        argument_bytes: size of the arguments.
        output_bytes: size of the results.
        alias_bytes: part of the results that reuses the memory of donated arguments.
        temporary_bytes: memory needed in between.
        total_bytes: arguments + outputs + temporaries - aliases.
        jaxpr_equations: in the traced program, those of inner programs included.
        stablehlo_bytes: length of the program as it goes to the compiler.
        hlo_instructions: instructions in the optimized program.
        hlo_fusions: those of them that are several operations made into one.
        donated_buffers: arguments whose memory the results do reuse.
        float64_instructions: instructions of the optimized program with a float64 result.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    total_bytes: int
    jaxpr_equations: int
    stablehlo_bytes: int
    hlo_instructions: int
    hlo_fusions: int
    donated_buffers: int
    float64_instructions: int

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs for each byte accessed; NaN where none is."""
        return self.flops / self.bytes_accessed if self.bytes_accessed else float("nan")


@dataclass(frozen=True, kw_only=True)
class CompileTimes:
    """Seconds of each step on the way from Python to machine code.

    Attributes:
        cached: whether the machine code came from the persistent compilation cache.
    """

    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    cached: bool = False

    @property
    def total_seconds(self) -> float:
        """Sum of the three."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds


NO_COST = StaticCost(**{each.name: 0 for each in dataclasses.fields(StaticCost)})
NO_TIMES = CompileTimes(trace_seconds=0.0, lower_seconds=0.0, compile_seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds of the first calls of a function, each from arguments that are ready to results that are.

    Attributes:
        clock: returns seconds.
        seconds: of each timed call.
        trips: passes of the function's outermost loop in each of them.
    """

    clock: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    trips: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds of the first call; NaN before it."""
        return self.seconds[0] if self.seconds else float("nan")

    @property
    def steady(self) -> float:
        """Median of the seconds of a trip, after the first call; NaN before the second."""
        rest = [seconds / max(trips, 1) for seconds, trips in zip(self.seconds[1:], self.trips[1:], strict=True)]
        return statistics.median(rest) if rest else float("nan")


@dataclass(frozen=True, kw_only=True)
class CompiledFunction:
    """A function compiled for one set of shapes; calling it with other shapes is an error, never a recompilation.

    Attributes:
        call: the machine code.
        signature: shapes and dtypes that it takes.
        calls: its first calls, timed; None to time none.
        trips_of: arguments → how often a call passes its outermost loop, whose cost is that of one trip.
        texts: returns what it was on its way, by `jaxpr`, `stablehlo` and `hlo`.
    """

    name: str
    call: Callable[..., Any]
    cost: StaticCost
    times: CompileTimes
    signature: str = ""
    calls: CallTimes | None = None
    trips_of: Callable[..., int] | None = None
    texts: Callable[[], dict[str, str]] = dict

    @property
    def flops_per_second(self) -> float:
        """Of the steady calls, by the static cost; NaN where none was timed."""
        return self._by_time(self.cost.flops)

    @property
    def bytes_per_second(self) -> float:
        """Likewise, read and written."""
        return self._by_time(self.cost.bytes_accessed)

    def _by_time(self, work: int) -> float:
        return work / self.calls.steady if self.calls and self.calls.steady else float("nan")

    def __call__(self, *args: Any) -> Any:
        calls = self.calls
        if calls is None or len(calls.seconds) >= TIMED_CALLS:
            return self.call(*args)
        jax.block_until_ready(args)  # else the call would wait for what others put into the queue
        trips = self.trips_of(*args) if self.trips_of else 1
        started = calls.clock()
        results = jax.block_until_ready(self.call(*args))
        calls.seconds.append(calls.clock() - started)
        calls.trips.append(trips)
        return results


class Compiler:
    """Compiles functions for a caller who wants to know afterwards what they cost.

    Args:
        clock: returns seconds, such as `time.perf_counter`.
        guard: digest of a program → a context in which to compile it, such as a lock of a shared cache.

    Attributes:
        functions: the last one of each name, in the order of their first compilation.
        compilations: how often each name was compiled.
    """

    def __init__(self, clock: Callable[[], float], guard: Guard | None = None):
        self.clock = clock
        self.guard = guard or (lambda _: contextlib.nullcontext())
        self.functions: dict[str, CompiledFunction] = {}
        self.compilations: Counter[str] = Counter()

    def compile(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: tuple[int, ...] = (),
        out_shardings: jax.sharding.Sharding | None = None,
        trips_of: Callable[..., int] | None = None,
    ) -> CompiledFunction:
        """Compile `function` for the shapes and dtypes of `args`.

        Args:
            name: under which the figures are reported.
            function: pure; takes and returns pytrees of arrays.
            args: arrays, or `jax.ShapeDtypeStruct` in their place.
            donate_argnums: arguments whose memory the results may reuse; the caller's arrays become invalid.
            out_shardings: where the results lie; None leaves that to the compiler.
            trips_of: of a loop whose bounds are arguments, how often it is passed.
        """
        config: Any = jax.config  # whose switches mypy does not know
        if config.jax_disable_jit or config.jax_debug_nans:  # to step through, and to find what made a NaN
            return CompiledFunction(name=name, call=jax.jit(function), cost=NO_COST, times=NO_TIMES)
        with asked_for():
            made = self._compile(name, function, args, donate_argnums, out_shardings, trips_of)
        self.functions[name] = made
        self.compilations[name] += 1
        return made

    def _compile(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        donate_argnums: tuple[int, ...],
        out_shardings: jax.sharding.Sharding | None,
        trips_of: Callable[..., int] | None,
    ) -> CompiledFunction:
        placing: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
        started = self.clock()
        traced = jax.jit(function, donate_argnums=donate_argnums, **placing).trace(*args)
        traced_at = self.clock()
        lowered = traced.lower()
        lowered_at = self.clock()
        stablehlo = lowered.as_text()
        with self.guard(hashlib.sha256(stablehlo.encode()).hexdigest()):
            hits, begun = cache_hits(), self.clock()
            compiled = lowered.compile()
            ended, cached = self.clock(), cache_hits() > hits
        return CompiledFunction(
            name=name,
            call=compiled,
            cost=_static_cost(traced, lowered, compiled, len(stablehlo)),
            times=CompileTimes(
                trace_seconds=traced_at - started,
                lower_seconds=lowered_at - traced_at,
                compile_seconds=ended - begun,
                cached=cached,
            ),
            signature=_signature(args),
            calls=CallTimes(clock=self.clock),
            trips_of=trips_of,
            texts=lambda: {"jaxpr": str(traced.jaxpr), "stablehlo": stablehlo, "hlo": compiled.as_text() or ""},
        )


def compile_within(
    budget: int, largest: int, compile_at: Callable[[int], CompiledFunction], *, at_least: int = 0
) -> tuple[CompiledFunction, int]:
    """Compile a function for the largest size whose temporary arrays fit into a budget.

    Args:
        budget: bytes.
        largest: the size to begin with; it is halved as often as it takes.
        compile_at: size → the function.
        at_least: a size that is taken whatever it needs.

    Raises:
        ConfigError: size 1 does not fit; one line that says what it needs.
    """
    size = largest
    while True:
        function = compile_at(size)
        needed = function.cost.temporary_bytes
        if needed <= budget or size <= at_least:
            return function, size
        if size == 1:
            raise ConfigError(
                f"runtime.memory_budget_mib: a single example takes {function.name} {-(-needed // 2**20):,} MiB, "
                f"more than the {budget // 2**20:,} there are"
            )
        while size > max(1, at_least) and needed > budget:  # memory goes nearly by the size
            size, needed = size // 2, needed // 2


def cost_metrics(functions: Sequence[CompiledFunction]) -> dict[str, int]:
    """Return the static costs that a person watches as flat metrics, `compile/<function>/<figure>`."""
    return {
        f"compile/{function.name}/{figure}": getattr(function.cost, figure)
        for function in functions
        for figure in WATCHED
    }


def time_metrics(functions: Sequence[CompiledFunction]) -> dict[str, float]:
    """Return what was timed as flat metrics, `compile/<function>/<figure>`, and the whole time of compiling.

    A function that was not called yet has no times of calls.
    """
    found: dict[str, float] = {}
    for function in functions:
        figures: dict[str, float] = dataclasses.asdict(function.times)
        if function.calls:
            figures |= {"first_call_seconds": function.calls.first, "steady_call_seconds": function.calls.steady}
        figures |= {"flops_per_second": function.flops_per_second, "bytes_per_second": function.bytes_per_second}
        found |= {f"compile/{function.name}/{key}": float(value) for key, value in figures.items()}
    found["compile/total_seconds"] = sum(function.times.total_seconds for function in functions)
    return {name: value for name, value in found.items() if np.isfinite(value)}


def _signature(args: Sequence[Any]) -> str:
    """Return shapes and dtypes of the arguments, in short."""
    return ", ".join(jax.core.ShapedArray(leaf.shape, leaf.dtype).str_short() for leaf in jax.tree.leaves(args))


def _static_cost(traced: Any, lowered: Any, compiled: Any, stablehlo_bytes: int) -> StaticCost:
    cost: dict[str, float] = compiled.cost_analysis() or {}
    repeated = repeated_costs(traced.jaxpr, cost, lowered)
    memory: Any = compiled.memory_analysis()
    header, _, body = (compiled.as_text() or "").partition("\n")
    lines = [line for line in body.splitlines() if " = " in line]
    return StaticCost(
        flops=int(cost.get("flops", 0) + repeated.flops),
        transcendentals=int(cost.get("transcendentals", 0) + repeated.transcendentals),
        bytes_accessed=int(cost.get("bytes accessed", 0) + repeated.bytes_accessed),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        jaxpr_equations=count_equations(traced.jaxpr),
        stablehlo_bytes=stablehlo_bytes,
        hlo_instructions=len(lines),
        hlo_fusions=sum(" fusion(" in line for line in lines),
        donated_buffers=len(re.findall(r"(?:may|must)-alias", header)),
        float64_instructions=sum(re.search(r" = \(?[^()]*\bf64\[", line) is not None for line in lines),
    )
