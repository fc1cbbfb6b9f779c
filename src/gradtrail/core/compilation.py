"""Compiles a function ahead of time and says what that took and what the result costs.

Knows nothing of stages; the caller hands in the clock. Figures come from the compiler, on abstract arguments, and are
the same on every run of one version on one kind of processor; times are not, and are kept apart.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from gradtrail.core.bounds import ConfigError

WATCHED = ("flops", "bytes_accessed", "total_bytes", "hlo_instructions")


@dataclass(frozen=True, kw_only=True)
class StaticCost:
    """What one call costs by the compiler's account. It counts the body of a loop once, whatever the trip count.

    Attributes:
        flops: floating-point operations.
        transcendentals: exponentials, logarithms and the like.
        bytes_accessed: bytes read and written.
        argument_bytes: size of the arguments.
        output_bytes: size of the results.
        alias_bytes: part of the results that reuses the memory of donated arguments.
        temporary_bytes: memory needed in between.
        total_bytes: arguments + outputs + temporaries - aliases.
        hlo_instructions: instructions in the optimized program.
    """

    flops: int
    transcendentals: int
    bytes_accessed: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    total_bytes: int
    hlo_instructions: int


@dataclass(frozen=True, kw_only=True)
class CompileTimes:
    """Seconds of each step on the way from Python to machine code."""

    trace_seconds: float
    lower_seconds: float
    compile_seconds: float


NO_COST = StaticCost(**{field.name: 0 for field in dataclasses.fields(StaticCost)})
NO_TIMES = CompileTimes(trace_seconds=0.0, lower_seconds=0.0, compile_seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class CompiledFunction:
    """A function compiled for one set of shapes; calling it with other shapes is an error, never a recompilation."""

    name: str
    call: Callable[..., Any]
    cost: StaticCost
    times: CompileTimes

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def compile_function(
    name: str,
    function: Callable[..., Any],
    *args: Any,
    clock: Callable[[], float],
    donate_argnums: tuple[int, ...] = (),
    out_shardings: jax.sharding.Sharding | None = None,
) -> CompiledFunction:
    """Compile `function` for the shapes and dtypes of `args`.

    Args:
        name: under which the figures are reported.
        function: pure; takes and returns pytrees of arrays.
        args: arrays, or `jax.ShapeDtypeStruct` in their place.
        clock: returns seconds, such as `time.perf_counter`.
        donate_argnums: arguments whose memory the results may reuse; the caller's arrays become invalid.
        out_shardings: where the results lie; None leaves that to the compiler.
    """
    config: Any = jax.config  # whose switches mypy does not know
    if config.jax_disable_jit or config.jax_debug_nans:  # to step through, and to find what made a NaN
        return CompiledFunction(name=name, call=jax.jit(function), cost=NO_COST, times=NO_TIMES)
    placing: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
    started = clock()
    traced = jax.jit(function, donate_argnums=donate_argnums, **placing).trace(*args)
    traced_at = clock()
    lowered = traced.lower()
    lowered_at = clock()
    compiled = lowered.compile()
    times = CompileTimes(
        trace_seconds=traced_at - started,
        lower_seconds=lowered_at - traced_at,
        compile_seconds=clock() - lowered_at,
    )
    return CompiledFunction(name=name, call=compiled, cost=_static_cost(compiled), times=times)


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


def cost_metrics(functions: list[CompiledFunction]) -> dict[str, int]:
    """Return the static costs that a person watches as flat metrics, `compile/<function>/<figure>`."""
    costs = _flat(functions, lambda function: function.cost)
    return {name: value for name, value in costs.items() if name.rpartition("/")[2] in WATCHED}


def time_metrics(functions: list[CompiledFunction]) -> dict[str, float]:
    """Return the compile times as flat metrics, `compile/<function>/<step>_seconds`, and their total."""
    times = _flat(functions, lambda function: function.times)
    return {**times, "compile/total_seconds": sum(times.values())}


def _flat(functions: list[CompiledFunction], figures_of: Callable[[CompiledFunction], Any]) -> dict[str, Any]:
    return {
        f"compile/{function.name}/{key}": value
        for function in functions
        for key, value in dataclasses.asdict(figures_of(function)).items()
    }


def _static_cost(compiled: jax.stages.Compiled) -> StaticCost:
    cost: dict[str, float] = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return StaticCost(
        flops=int(cost.get("flops", 0)),
        transcendentals=int(cost.get("transcendentals", 0)),
        bytes_accessed=int(cost.get("bytes accessed", 0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        total_bytes=total,
        hlo_instructions=sum(" = " in line for line in (compiled.as_text() or "").splitlines()),
    )
