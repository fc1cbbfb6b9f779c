"""Compiles functions ahead of time and records compile times, static costs and the times of the first calls.

Static costs are those of XLA's cost analysis on abstract arguments: equal on every run of one version of jaxlib on one
kind of processor. Times vary from run to run and are kept apart from them. The clock is the caller's.
"""

import contextlib
import dataclasses
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from gradtrail.core.xla.compile_events import LONGEST_LINE, CompileLog, cache_hits, describe, project_line
from gradtrail.core.xla.static_costs import NO_COST, StaticCost, lost_donations, shape, static_cost

TIMED_CALLS = 12  # timed calls of each function: the first, and enough others for a median
Guard = Callable[[str], contextlib.AbstractContextManager[object]]
Wrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class CompileTimes:
    """Seconds of tracing, lowering and compiling one function."""

    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    cached: bool = False  # whether the machine code came from the persistent compilation cache

    @property
    def total_seconds(self) -> float:
        """Sum of the three."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds


NO_TIMES = CompileTimes(trace_seconds=0.0, lower_seconds=0.0, compile_seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """Seconds of the first calls of a function, each from ready arguments to ready results."""

    clock: Callable[[], float]  # returns seconds
    seconds: list[float] = field(default_factory=list)  # seconds of each timed call
    trips: list[int] = field(default_factory=list)  # iterations of the function's outermost loop in each of them

    @property
    def first(self) -> float:
        """Seconds of the first call; NaN before it."""
        return self.seconds[0] if self.seconds else float("nan")

    @property
    def steady(self) -> float:
        """Median seconds per iteration over the calls after the first; NaN before the second call."""
        rest = [seconds / max(trips, 1) for seconds, trips in zip(self.seconds[1:], self.trips[1:], strict=True)]
        return statistics.median(rest) if rest else float("nan")


@dataclass(frozen=True, kw_only=True)
class CompiledFunction:
    """A function compiled ahead of time for one set of shapes and dtypes.

    A call with other shapes or dtypes raises TypeError; nothing is compiled again.
    """

    name: str
    call: Callable[..., Any]  # the executable
    cost: StaticCost
    times: CompileTimes
    signature: str = ""  # shapes and dtypes of the arguments
    # shapes and dtypes of the arguments whose memory the results should reuse, and do not
    lost_donations: tuple[str, ...] = ()
    line: str = ""  # line of the project that compiled it
    calls: CallTimes | None = None  # times of its first calls; None to time none
    # arguments → iterations of the outermost loop, if `cost` is that of one iteration
    trips_of: Callable[..., int] | None = None
    texts: Callable[[], dict[str, str]] = dict  # returns the program as `jaxpr`, `stablehlo` and optimized `hlo`

    @property
    def flops_per_second(self) -> float:
        """Static FLOPs over the time of a steady call; NaN if none was timed."""
        return self._per_second(self.cost.flops)

    @property
    def bytes_per_second(self) -> float:
        """Touched bytes over the time of a steady call; NaN if none was timed."""
        return self._per_second(self.cost.touched_bytes)

    def _per_second(self, work: int) -> float:
        return work / self.calls.steady if self.calls and self.calls.steady else float("nan")

    def __call__(self, *args: Any) -> Any:
        calls = self.calls
        if calls is None or len(calls.seconds) >= TIMED_CALLS:
            return self.call(*args)
        jax.block_until_ready(args)  # else earlier asynchronous work would count as this call's
        trips = self.trips_of(*args) if self.trips_of else 1
        started = calls.clock()
        results = jax.block_until_ready(self.call(*args))
        calls.seconds.append(calls.clock() - started)
        calls.trips.append(trips)
        return results


class Compiler:
    """Compiles functions ahead of time and records every compilation.

    Args:
        clock: returns seconds, such as `time.perf_counter`.
        guard: digest of a program → a context to compile it in, such as a lock of a shared cache.
        log: open log that counts these compilations as planned.
        wrapper: name, executable → a callable to use instead, such as one that records the calls.

    Attributes:
        functions: the last function of each name, in the order of their first compilation.
        compiled: every compilation in order, without its executable; those of variants have the variant in the name.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        guard: Guard | None = None,
        log: CompileLog | None = None,
        wrapper: Wrapper | None = None,
    ):
        self.clock = clock
        self._wrapper = wrapper or (lambda _, call: call)
        self.guard = guard or (lambda _: contextlib.nullcontext())
        self._log = log or CompileLog()
        self._suffix = ""
        self.functions: dict[str, CompiledFunction] = {}
        self.compiled: list[CompiledFunction] = []

    def for_variant(self, label: str) -> "Compiler":
        """Return a compiler for a variant of the same functions: `compiled` is shared, `functions` is not."""
        variant = Compiler(self.clock, self.guard, self._log, self._wrapper)
        variant._suffix, variant.compiled = f" ({label})", self.compiled
        return variant

    @property
    def warnings(self) -> list[str]:
        """A line for each function that calls compiled, unplanned, and for each that lost a donation."""
        return describe(self._log.unplanned) + [
            f"{function.name}, compiled at {function.line}, does not reuse the memory of "
            f"{len(function.lost_donations)} arguments: {', '.join(function.lost_donations)[:LONGEST_LINE]}"
            for function in self.compiled
            if function.lost_donations
        ]

    def planned(self) -> contextlib.AbstractContextManager[None]:
        """Count what this thread compiles in the block as planned, see `CompileLog.planned`."""
        return self._log.planned()

    @property
    def compilations(self) -> Counter[str]:
        """Number of compilations by name."""
        return Counter(function.name for function in self.compiled)

    def compile(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        donate_argnums: tuple[int, ...] = (),
        expect_donated: tuple[int, ...] = (),
        out_shardings: jax.sharding.Sharding | None = None,
        trips_of: Callable[..., int] | None = None,
        unread_bytes: int = 0,
    ) -> CompiledFunction:
        """Compile `function` for the shapes and dtypes of `args`.

        Under `jax.disable_jit` and `jax.debug_nans` nothing is compiled ahead of time: the result runs by `jax.jit`,
        takes any shape, and its costs are reported as zero.

        Args:
            name: name of its costs and times in reports.
            function: pure; takes and returns pytrees of arrays.
            args: arrays, or `jax.ShapeDtypeStruct` in their place.
            donate_argnums: arguments whose memory the results may reuse; the caller's arrays become invalid.
            expect_donated: arguments whose memory the results must reuse; `lost_donations` lists those that XLA did not
                alias, like those of `donate_argnums`. A separate list, so that a forgotten donation is reported.
            out_shardings: shardings of the results; None leaves them to the compiler.
            trips_of: number of iterations of a loop whose bounds are arguments, see `CompiledFunction`.
            unread_bytes: size of the rows of an argument that the program does not gather; XLA's cost analysis on CPU
                counts the whole argument as read.
        """
        config: Any = jax.config  # mypy does not know its switches
        if config.jax_disable_jit or config.jax_debug_nans:
            return CompiledFunction(
                name=name, call=self._wrapper(name, jax.jit(function)), cost=NO_COST, times=NO_TIMES
            )
        placing: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
        with self._log.planned():
            jitted = jax.jit(function, donate_argnums=donate_argnums, keep_unused=bool(donate_argnums), **placing)
            compiled = self._compile(name, jitted, args, unread_bytes)
        lost = lost_donations(compiled.call, args, {*donate_argnums, *expect_donated})
        call = self._wrapper(name, compiled.call)
        compiled = dataclasses.replace(compiled, call=call, trips_of=trips_of, lost_donations=lost, line=project_line())
        self.functions[name] = compiled
        self.compiled.append(dataclasses.replace(compiled, name=name + self._suffix, call=_no_executable, texts=dict))
        return compiled

    def _compile(self, name: str, function: Any, args: Sequence[Any], unread_bytes: int) -> CompiledFunction:
        started = self.clock()
        traced = function.trace(*args)
        traced_at = self.clock()
        lowered = traced.lower()
        lowered_at = self.clock()
        stablehlo = lowered.as_text()
        with self.guard(hashlib.sha256(stablehlo.encode()).hexdigest()), cache_hits() as hits:
            compile_started = self.clock()
            compiled = lowered.compile()
            compile_ended = self.clock()
        return CompiledFunction(
            name=name,
            call=compiled,
            cost=static_cost(traced, lowered, compiled, len(stablehlo), unread_bytes),
            times=CompileTimes(
                trace_seconds=traced_at - started,
                lower_seconds=lowered_at - traced_at,
                compile_seconds=compile_ended - compile_started,
                cached=bool(hits),
            ),
            signature=_signature(args),
            calls=CallTimes(clock=self.clock),
            texts=lambda: {"jaxpr": str(traced.jaxpr), "stablehlo": stablehlo, "hlo": compiled.as_text() or ""},
        )


def compile_within(
    budget: int, largest: int, compile_at: Callable[[int], CompiledFunction], *, at_least: int = 1
) -> tuple[CompiledFunction, int]:
    """Compile a function for the largest size whose temporary arrays fit into a budget; return it and the size.

    Args:
        budget: bytes.
        largest: the first size to try; it is halved until the function fits.
        compile_at: size → the function.
        at_least: smallest size, which is accepted whatever it needs.
    """
    size = largest
    while True:
        function = compile_at(size)
        needed = function.cost.temporary_bytes
        if needed <= budget or size <= at_least:
            return function, size
        while size > at_least and needed > budget:  # memory is nearly proportional to the size
            size, needed = size // 2, needed // 2


def static_costs(functions: Iterable[CompiledFunction]) -> dict[str, dict[str, int]]:
    """Return function → cost → value, see `StaticCost`."""
    return {function.name: dataclasses.asdict(function.cost) for function in functions}


def _no_executable(*_: Any) -> Any:
    raise TypeError("this entry has no executable; it only records the compilation")


def _signature(args: Sequence[Any]) -> str:
    """Return shapes and dtypes of the arguments, such as `float32[8,8], int32[]`."""
    return ", ".join(map(shape, jax.tree.leaves(args)))
