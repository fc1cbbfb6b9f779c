"""Compiles functions ahead of time and records compile times, static costs and the times of the first calls.

Static costs are those of XLA's cost analysis on abstract arguments: equal on every run of one version of jaxlib on one
kind of processor. Times vary from run to run and are kept apart from them. The clock is the caller's.
"""

import contextlib
import dataclasses
import hashlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core

from gradtrail.core.xla.checks import compile_checks
from gradtrail.core.xla.compile_log import CompileLog, cache_hits

TIMED_CALLS = 12  # timed calls of each function: the first, and enough others for a median
_ALIAS = re.compile(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)")  # in a program's header: parameter of a result
_COUNTED = ("flops", "transcendentals", "bytes accessed")  # costs that XLA counts once for the body of a loop
Wrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class StaticCost:
    """Cost of one call by the compiler's cost and memory analysis.

    The body of a loop of known length counts once per iteration. If the length depends on data, it counts with the
    largest length that the loop's condition states, and FLOPs, transcendentals and bytes are upper bounds; without such
    a bound, as in the loop over training steps, it counts once.
    """

    flops: int  # floating-point operations
    transcendentals: int  # exponentials, logarithms and the like
    bytes_accessed: int  # bytes read and written
    argument_bytes: int  # size of the arguments
    output_bytes: int  # size of the results
    alias_bytes: int  # part of the results that reuses the memory of donated arguments
    temporary_bytes: int  # memory for intermediate values
    total_bytes: int  # arguments + outputs + temporaries - aliases
    jaxpr_equations: int  # equations of the traced program, inner programs included
    stablehlo_bytes: int  # length of the StableHLO text
    hlo_instructions: int  # instructions in the optimized HLO
    hlo_fusions: int  # fusions among them
    donated_buffers: int  # arguments whose memory the results reuse
    float64_instructions: int  # instructions of the optimized program with a float64 result
    data_dependent_loops: int  # loops that are counted with their largest length
    touched_bytes: int  # bytes read and written, without rows of an argument that the program does not gather

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per touched byte; NaN without any."""
        return self.flops / self.touched_bytes if self.touched_bytes else float("nan")


@dataclass(frozen=True, kw_only=True)
class CompileTimes:
    """Seconds of tracing, lowering and compiling one function."""

    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    cached: bool = False  # whether the machine code came from the persistent compilation cache

    @property
    def total_seconds(self) -> float:
        """Sum of the three."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds


NO_COST = StaticCost(**{cost.name: 0 for cost in dataclasses.fields(StaticCost)})
NO_TIMES = CompileTimes()


@dataclass(kw_only=True)
class CallTimes:
    """Seconds of the first calls of a function, each from ready arguments to ready results."""

    clock: Callable[[], float]  # returns seconds
    first: float = float("nan")  # seconds of the first call; NaN before it
    later: list[float] = field(default_factory=list)  # seconds per iteration of the outermost loop in each later call
    most: int = TIMED_CALLS  # number of calls to time

    @property
    def steady(self) -> float:
        """Median seconds per iteration of the later calls; NaN before the second call."""
        return statistics.median(self.later) if self.later else float("nan")


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
    calls: CallTimes | None = None  # times of its first calls; None to time none
    # arguments → iterations of the outermost loop, if `cost` is that of one iteration
    num_iterations: Callable[..., int] = lambda *_: 1
    texts: Callable[[], dict[str, str]] = dict  # returns the program as `jaxpr`, `stablehlo` and optimized `hlo`
    check: Callable[..., None] = lambda *_: None  # called with the arguments before each call, see `checks`

    def __call__(self, *args: Any) -> Any:
        self.check(*args)
        calls = self.calls
        if calls is None or len(calls.later) >= calls.most - 1:
            return self.call(*args)
        jax.block_until_ready(args)  # else earlier asynchronous work would count as this call's
        iterations = max(self.num_iterations(*args), 1)
        started = calls.clock()
        results = jax.block_until_ready(self.call(*args))
        seconds = calls.clock() - started
        if math.isnan(calls.first):
            calls.first = seconds
        else:
            calls.later.append(seconds / iterations)
        return results


@dataclass(eq=False)
class Compiler:
    """Compiles functions ahead of time and records every compilation."""

    clock: Callable[[], float]  # returns seconds, such as `time.perf_counter`
    # digest of a program → a context to compile it in, such as a lock of a shared cache
    guard: Callable[[str], contextlib.AbstractContextManager[object]] | None = None
    log: CompileLog = field(default_factory=CompileLog)  # counts these compilations as planned while it is open
    wrapper: Wrapper | None = None  # name, executable → a callable to use instead, such as one that records the calls
    checks: Collection[str] = ()  # names in `CHECKS`, of every function
    variant: str = ""  # added to the names in `compiled`
    # last function of each name, in the order of their first compilation
    functions: dict[str, CompiledFunction] = field(default_factory=dict)
    compiled: list[CompiledFunction] = field(default_factory=list)  # every compilation in order, without executables

    def for_variant(self, label: str) -> "Compiler":
        """Return a compiler for a variant of the same functions: `compiled` is shared, `functions` is not."""
        return dataclasses.replace(self, variant=f" ({label})", functions={})

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
        out_shardings: jax.sharding.Sharding | None = None,
        num_iterations: Callable[..., int] = lambda *_: 1,
        unread_bytes: int = 0,
        timed_calls: int = TIMED_CALLS,
    ) -> CompiledFunction:
        """Compile a pure function for the shapes and dtypes of `args`, which may be abstract.

        Under `jax.disable_jit` the result runs by `jax.jit`, takes any shape, and its costs are reported as zero.

        Args:
            donate_argnums: arguments whose memory the results may reuse; the caller's arrays become invalid.
            num_iterations: number of iterations of a loop whose bounds are arguments, see `CompiledFunction`.
            unread_bytes: size of the rows of an argument that the program does not gather; XLA's cost analysis on CPU
                counts the whole argument as read.
            timed_calls: number of first calls that are timed, for which the host waits.
        """
        config: Any = jax.config  # mypy does not know its switches
        wrap = self.wrapper or (lambda _, call: call)
        if config.jax_disable_jit:
            return CompiledFunction(name=name, call=wrap(name, jax.jit(function)), cost=NO_COST, times=NO_TIMES)

        placing: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
        with self.log.planned():
            jitted = jax.jit(function, donate_argnums=donate_argnums, keep_unused=bool(donate_argnums), **placing)
            started = self.clock()
            traced = jitted.trace(*args)
            traced_at = self.clock()
            lowered = traced.lower()
            lowered_at = self.clock()
            stablehlo = lowered.as_text()
            guard = self.guard or contextlib.nullcontext
            with guard(hashlib.sha256(stablehlo.encode()).hexdigest()), cache_hits() as hits:
                compile_started = self.clock()
                executable = lowered.compile()
                compile_ended = self.clock()
            hlo = executable.as_text() or ""
            cost = _static_cost(traced, lowered, executable, len(stablehlo), hlo, unread_bytes)
            check = {"check": compile_checks(name, function, args, self.checks)} if self.checks else {}

        compiled = CompiledFunction(
            name=name,
            call=wrap(name, executable),
            cost=cost,
            times=CompileTimes(
                trace_seconds=traced_at - started,
                lower_seconds=lowered_at - traced_at,
                compile_seconds=compile_ended - compile_started,
                cached=bool(hits),
            ),
            signature=", ".join(map(_shape, jax.tree.leaves(args))),
            calls=CallTimes(clock=self.clock, most=timed_calls),
            num_iterations=num_iterations,
            texts=lambda: {"jaxpr": str(traced.jaxpr), "stablehlo": stablehlo, "hlo": hlo},
            **check,
        )
        self.log.signatures.add(function, args, {}, ())
        self.functions[name] = compiled
        self.compiled.append(dataclasses.replace(compiled, name=name + self.variant, call=_no_executable, texts=dict))
        return compiled


def static_costs(functions: Iterable[CompiledFunction]) -> dict[str, dict[str, int]]:
    """Return function → cost → value, see `StaticCost`."""
    return {function.name: dataclasses.asdict(function.cost) for function in functions}


def _static_cost(
    traced: Any, lowered: Any, executable: Any, stablehlo_bytes: int, hlo: str, unread_bytes: int
) -> StaticCost:
    cost: dict[str, float] = executable.cost_analysis() or {}
    accessed = cost.get("bytes accessed", 0.0)
    repeated = _repeated_costs(traced.jaxpr.jaxpr)
    # By the whole program, loops once; XLA cannot tell for a program that `jax.export` read, which has no loops
    before = (lowered.cost_analysis() or {}).get("bytes accessed", 0.0) if repeated["bytes accessed"] else 0.0

    def with_loops(optimized: float) -> int:
        """Add the bytes of repeated iterations, scaled as optimization scaled the program's."""
        return int(optimized + optimized / before * repeated["bytes accessed"]) if before else int(optimized)

    memory: Any = executable.memory_analysis()
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    temporaries, aliases = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    header, _, body = hlo.partition("\n")
    lines = [line for line in body.splitlines() if " = " in line]
    equations = list(_equations(traced.jaxpr.jaxpr))
    return StaticCost(
        flops=int(cost.get("flops", 0.0) + repeated["flops"]),
        transcendentals=int(cost.get("transcendentals", 0.0) + repeated["transcendentals"]),
        bytes_accessed=with_loops(accessed),
        argument_bytes=arguments,
        output_bytes=outputs,
        alias_bytes=aliases,
        temporary_bytes=temporaries,
        total_bytes=arguments + outputs + temporaries - aliases,
        jaxpr_equations=len(equations),
        stablehlo_bytes=stablehlo_bytes,
        hlo_instructions=len(lines),
        hlo_fusions=sum(" fusion(" in line for line in lines),
        donated_buffers=len(_ALIAS.findall(header)),
        float64_instructions=sum(re.search(r" = \(?[^()]*\bf64\[", line) is not None for line in lines),
        data_dependent_loops=sum(_largest_length(equation) is not None for equation in equations),
        touched_bytes=with_loops(max(0.0, accessed - unread_bytes)),
    )


def _repeated_costs(jaxpr: jax_core.Jaxpr) -> dict[str, float]:
    """Return the costs, before optimization, of all iterations after the first of the loops in a program.

    A `scan` counts with its length, a `while` with the bound that its condition states, see `_largest_length`.
    """
    terms: list[tuple[float, dict[str, float]]] = []  # factor and costs
    for equation in jaxpr.eqns:
        is_scan = equation.primitive.name == "scan"
        length = equation.params["length"] if is_scan else _largest_length(equation)
        inner = map(_repeated_costs, jax_core.jaxprs_in_params(equation.params))
        terms += [(1 if length is None else length, costs) for costs in inner]
        if length is not None and length != 1:
            body = equation.params["jaxpr" if is_scan else "body_jaxpr"]
            terms.append((length - 1, _iteration_cost(body)))
    return {name: sum(factor * costs.get(name, 0.0) for factor, costs in terms) for name in _COUNTED}


def _iteration_cost(body: Any) -> dict[str, float]:
    """Return the costs of a loop's body, with one iteration of each inner loop."""
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in body.in_avals]
    return jax.jit(jax_core.jaxpr_as_fun(body)).lower(*arguments).cost_analysis() or {}


def _largest_length(equation: Any) -> int | None:
    """Return the largest number of iterations of a `while`; None for another equation, or one without such a bound.

    A loop whose length depends on data states the bound as `counter < constant` in its condition, next to the test of
    the data; the counter starts at 0.
    """
    if equation.primitive.name != "while":
        return None
    tests = [test for test in equation.params["cond_jaxpr"].jaxpr.eqns if test.primitive.name == "lt"]
    limits = [test.invars[1].val for test in tests if isinstance(test.invars[1], jax_core.Literal)]
    return min((int(limit) for limit in limits if jnp.issubdtype(jnp.result_type(limit), jnp.integer)), default=None)


def _equations(jaxpr: jax_core.Jaxpr) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for program in jax_core.jaxprs_in_params(equation.params):
            yield from _equations(program)


def _shape(leaf: Any) -> str:
    """Return shape and dtype of an array, concrete or abstract, such as `float32[8,8]`."""
    return jax.core.ShapedArray(leaf.shape, leaf.dtype).str_short()


def _no_executable(*_: Any) -> Any:
    raise TypeError("this entry has no executable; it only records the compilation")
