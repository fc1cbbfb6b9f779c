"""Times of the variants of a profile, for its run in MLflow: metrics, tables and figures. Changes no output.

Nothing is timed without tracking, or with a debug switch on, which changes the compiled functions.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from gradtrail.core.intervals import median_interval
from gradtrail.core.profile.benchmark import Bench, FunctionTime, MachineRates, StepTimes, measure_rates
from gradtrail.core.profile.variants import CompiledVariant, ProfileConfig, Variant
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.profile import time_figures
from gradtrail.stages.profile.tables import configured_rows, doubling_table
from gradtrail.support.memory import available_bytes, release_memory

_MIB = 2**20
_NO_NUMBERS = ("function", "variant", "rounds")  # of a `FunctionTime`
_REFERENCE = "float32"
DOUBLED = ("seconds", "examples_per_second", "temporary_mib", "total_mib")


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Measured times."""

    functions: pd.DataFrame  # a row for each function of each variant, of `function_table`
    times: pd.DataFrame  # a row for each function of the configured variant, of `time_table`
    steps: StepTimes  # times of the configured training step in three ways
    rates: MachineRates  # highest rates of the machine, measured before and after the functions
    precisions: dict[str, float]  # metrics of `precision_ratios`


def is_timed(runtime: RuntimeConfig, *, is_tracked: bool) -> bool:
    """Return True if the variants are to be timed."""
    return is_tracked and not (runtime.debug_nans or runtime.disable_jit)


def take(
    config: ProfileConfig,
    compiled: Sequence[CompiledVariant],
    num_classes: int,
    *,
    compiler: Compiler,
    advance: Callable[..., object],
) -> Timings:
    """Time all variants that fit into memory; warn of each that does not.

    Args:
        config: number of steps, and the time limit.
        compiled: compiled variants, the configured one first.
        num_classes: number of classes of the data set.
        compiler: compiler of the variants.
        advance: function that is called with a `message` after each of two steps.
    """
    bench = Bench(config, num_classes, compiler)
    with compiler.planned():  # steps without jit compile each operation: that is what is timed
        rates = [measure_rates(compiler.clock)]
        times = bench.time_functions([variant for variant in compiled if _fits(variant)])
        rates.append(measure_rates(compiler.clock))
        advance(message="timed all variants")
        steps = bench.time_steps(compiled[0])
    release_memory()
    advance(message="timed the same steps in three ways")
    roof = _highest(rates)
    table = function_table(times, compiled, roof)
    return Timings(
        functions=table,
        times=time_table(compiled[0], table),
        steps=steps,
        rates=roof,
        precisions=precision_ratios(times, compiled[0].variant),
    )


def function_table(
    times: Sequence[FunctionTime], compiled: Sequence[CompiledVariant], rates: MachineRates
) -> pd.DataFrame:
    """Return a row for each function of each variant: times, shares of the machine's rates, memory."""
    functions = {
        (variant.variant, name): function for variant in compiled for name, function in variant.functions.items()
    }
    rows = []
    for time in times:
        function = functions[time.variant, time.function]
        measured = {key: value for key, value in dataclasses.asdict(time).items() if key not in _NO_NUMBERS}
        rows.append(
            {"function": time.function, **dataclasses.asdict(time.variant), **measured}
            | {"share_of_matmul_rate": time.flops_per_second / rates.flops_per_second}
            | {"share_of_copy_rate": time.bytes_per_second / rates.bytes_per_second}
            | {"temporary_mib": function.cost.temporary_bytes / _MIB, "total_mib": function.cost.total_bytes / _MIB}
            | {"data_dependent_loops": function.cost.data_dependent_loops}
        )
    return pd.DataFrame(rows)


def precision_ratios(times: Sequence[FunctionTime], configured: Variant) -> dict[str, float]:
    """Return the ratio of step times of each precision to float32, as metrics with 95 % intervals.

    The ratios are taken round by round, so that drift of the machine cancels out. Empty without float32, or with
    too few rounds for an interval.
    """
    rounds: dict[str, tuple[float, ...]] = {
        time.variant.precision: time.rounds
        for time in times
        if time.function == "train_step"
        and dataclasses.replace(time.variant, precision=configured.precision) == configured
    }
    values: dict[str, float] = {}
    for precision in rounds.keys() - {_REFERENCE}:
        ratios = [time / other for time, other in zip(rounds[precision], rounds.get(_REFERENCE, ()), strict=False)]
        if ratios and math.isfinite((ratio := median_interval(ratios)).low):
            name = f"{precision}_over_{_REFERENCE}"
            values |= {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    return values


def step_table(steps: StepTimes) -> pd.DataFrame:
    """Return a row for each way to run the same training steps."""
    rows = [
        ("without jit", steps.without_jit, 0.0, steps.steps_without_jit),
        ("jit, one by one", steps.one_by_one, steps.compile_seconds, steps.steps_with_jit),
        ("jit, in a loop on the device", steps.scanned, steps.compile_seconds, steps.steps_with_jit),
    ]
    return pd.DataFrame(rows, columns=["way", "seconds_per_step", "seconds_before", "steps"])


def time_table(configured: CompiledVariant, table: pd.DataFrame) -> pd.DataFrame:
    """Return the time of each configured function in an epoch, by phase, in seconds.

    Returns:
        Columns `function`, `trace`, `lower`, `compile`, `first call`, `calls` (in an epoch) and `an epoch`.
    """
    pace = configured_rows(table, configured.variant, but="").set_index("function")["seconds"]
    calls = configured.program.steps_per_epoch
    rows = [
        {
            "function": name,
            "trace": function.times.trace_seconds,
            "lower": function.times.lower_seconds,
            "compile": function.times.compile_seconds,
            "first call": function.calls.first if function.calls else np.nan,
            "calls": calls,
            "an epoch": calls * pace[name],
        }
        for name, function in configured.functions.items()
    ]
    return pd.DataFrame(rows)


def metrics(timings: Timings) -> dict[str, float]:
    """Return the gains of compiling, looping and precisions as metrics; infinite ones are left out."""
    steps = timings.steps
    values = timings.precisions | {
        "jit/seconds_per_step": steps.one_by_one,
        "jit/seconds_per_step_without": steps.without_jit,
        "jit/steps_timed_without": steps.steps_without_jit,
        "jit/speedup": steps.jit_speedup,
        "jit/compile_seconds": steps.compile_seconds,
        "jit/steps_until_it_pays": steps.steps_until_it_pays,
        "scan/seconds_per_step": steps.scanned,
        "scan/speedup": steps.scan_speedup,
    }
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def write(folder: Path, timings: Timings, configured: Variant, title: str) -> None:
    """Write tables and figures to a folder."""
    title = f"{title} · {_device()}"
    doubling = doubling_table(timings.functions, configured, DOUBLED)
    timings.functions.to_csv(folder / "functions.csv", index=False)
    doubling.to_csv(folder / "doubling.csv", index=False)
    timings.times.to_csv(folder / "where_the_time_goes.csv", index=False)
    step_table(timings.steps).to_csv(folder / "steps.csv", index=False)
    functions = timings.functions
    drawn = {
        "jit": time_figures.draw_steps(timings.steps, title),
        "batch_sizes": time_figures.draw_batch_sizes(functions, doubling, configured, title),
        "precision_and_remat": time_figures.draw_forms(functions, configured, title),
        "roofline": time_figures.draw_roofline(functions, configured, timings.rates, title),
        "where_the_time_goes": time_figures.draw_times(timings.times, title),
    }
    for name, figure in drawn.items():
        plotting.save(figure, folder / f"{name}.png")


def _fits(compiled: CompiledVariant) -> bool:
    needed = max(function.cost.total_bytes for function in compiled.functions.values())
    if needed <= available_bytes():
        return True
    print(
        f"profile: warning: {compiled.variant.label}: not timed: needs {needed // _MIB:,} MiB, more than is free",
        file=sys.stderr,
    )
    return False


def _highest(rates: Sequence[MachineRates]) -> MachineRates:
    """Return the highest of each rate: other load on the machine can only lower a rate."""
    return MachineRates(
        flops_per_second=max(rate.flops_per_second for rate in rates),
        bytes_per_second=max(rate.bytes_per_second for rate in rates),
    )


def _device() -> str:
    device = jax.local_devices()[0]
    return f"{os.cpu_count()} cores" if device.platform == "cpu" else str(device.device_kind)
