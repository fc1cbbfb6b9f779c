"""Costs and times of the variants of a profile as tables and metrics.

Static costs are outs of the stage. Times go to its run in MLflow only; nothing is timed without tracking, or with a
debug switch on, which changes the compiled functions.
"""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gradtrail.core.batching import WINDOW
from gradtrail.core.intervals import median_interval
from gradtrail.core.profile import benchmark
from gradtrail.core.profile.benchmark import CompiledVariant, FunctionTime, MachineRates, ProfileConfig, Variant
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common import plotting
from gradtrail.stages.common.environment import RuntimeConfig
from gradtrail.stages.common.files import write_csv
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.profile import figures
from gradtrail.support.memory import available_bytes
from gradtrail.support.progress import progress_bar
from gradtrail.support.running_time import allowed_cores

_MIB = 2**20
_REFERENCE = "float32"
_COMPARED = {"train_step": ("flops", "total_bytes"), "predict": ("flops",)}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Measured times."""

    rows: list[Row]  # those of `time_rows`
    rates: MachineRates  # highest rates of the machine
    precisions: dict[str, float]  # metrics of `precision_ratios`


def is_timed(runtime: RuntimeConfig, *, is_tracked: bool) -> bool:
    """Return True if the variants are to be timed."""
    return is_tracked and not runtime.disable_jit


def compile_variants(
    config: ProfileConfig, train_config: TrainConfig, info: DatasetInfo, *, compiler: Compiler
) -> list[CompiledVariant]:
    """Compile all variants: the configured one first and alone, so that its compile times count, then the others."""
    most = max(WINDOW, train_config.batch_size, config.largest_batch_size)  # the cost of a step does not depend on it
    compile_one = functools.partial(
        benchmark.compile_variant,
        train_config,
        image_shape=info.image_shape,
        num_classes=info.num_classes,
        num_examples=min(info.examples["train"], most),
        compiler=compiler,
    )
    configured, *alternatives = benchmark.variants_to_compare(config, train_config, info.examples["train"])
    compiled = [compile_one(configured)]
    with (
        progress_bar("profile", 1 + len(alternatives), unit="steps") as bar,
        ThreadPoolExecutor(allowed_cores()) as pool,
    ):
        bar.advance(message=f"compiled {configured.label}")
        for result in pool.map(compile_one, alternatives):
            compiled.append(result)
            bar.advance(message=f"compiled {result.variant.label}")
    return compiled


def cost_rows(compiled: Sequence[CompiledVariant]) -> list[Row]:
    """Return a row for each function of each variant: its `StaticCost`."""
    rows = [
        {"function": name, **dataclasses.asdict(variant.variant), **dataclasses.asdict(function.cost)}
        for variant in compiled
        for name, function in variant.functions.items()
    ]
    return sorted(rows, key=lambda row: (row["function"], row["precision"], row["batch_size"], row["remat"]))


def measure(costs: Sequence[Row], configured: Variant) -> dict[str, int]:
    """Return the main costs of the configured variant as flat metrics, `<function>_<cost>`; the table has more."""
    by_function = {row["function"]: row for row in figures.variant_rows(costs, configured)}
    return {f"{name}_{cost}": int(by_function[name][cost]) for name, names in _COMPARED.items() for cost in names}


def take(
    config: ProfileConfig, compiled: Sequence[CompiledVariant], num_classes: int, *, compiler: Compiler
) -> Timings | None:
    """Time all variants that fit into memory; warn of each that does not.

    Returns:
        The times; None if the configured variant, the first, does not fit.
    """
    fitting = [variant for variant in compiled if _fits(variant)]
    if compiled[0] not in fitting:
        return None
    with compiler.log.planned():
        times = benchmark.time_variants(fitting, config, num_classes, compiler.clock)
        rates = benchmark.measure_rates(compiler.clock)
    ratios = precision_ratios(times, compiled[0].variant)
    return Timings(rows=time_rows(times, compiled, rates), rates=rates, precisions=ratios)


def time_rows(times: Sequence[FunctionTime], compiled: Sequence[CompiledVariant], rates: MachineRates) -> list[Row]:
    """Return a row for each timed function of each variant: seconds, rates and memory, and times of compiling it."""
    variants = {variant.variant: variant for variant in compiled}
    rows = []
    for time in times:
        variant = variants[time.variant]
        function = variant.functions[time.function]
        flops_per_second = function.cost.flops / time.seconds
        bytes_per_second = function.cost.touched_bytes / time.seconds
        rows.append(
            {
                "function": time.function,
                **dataclasses.asdict(time.variant),
                "seconds": time.seconds,
                "examples_per_second": time.variant.batch_size / time.seconds,
                "flops_per_second": flops_per_second,
                "bytes_per_second": bytes_per_second,
                "arithmetic_intensity": function.cost.arithmetic_intensity,
                "share_of_matmul_rate": flops_per_second / rates.flops_per_second,
                "share_of_copy_rate": bytes_per_second / rates.bytes_per_second,
                "temporary_mib": function.cost.temporary_bytes / _MIB,
                "total_mib": function.cost.total_bytes / _MIB,
                "data_dependent_loops": function.cost.data_dependent_loops,
                **dataclasses.asdict(function.times),
                "first_call_seconds": function.calls.first if function.calls else math.nan,
                "steps_per_epoch": variant.training.steps_per_epoch,
            }
        )
    return rows


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


def write(folder: Path, timings: Timings, configured: Variant, title: str) -> None:
    """Write the table `functions.csv` and two figures to a folder."""
    device = jax.local_devices()[0]
    title = f"{title} · {f'{os.cpu_count()} cores' if device.platform == 'cpu' else device.device_kind}"
    write_csv(folder / "functions.csv", timings.rows)
    plotting.save(figures.draw_times(timings.rows, configured, title), folder / "times.png")
    plotting.save(figures.draw_roofline(timings.rows, configured, timings.rates, title), folder / "roofline.png")


def _fits(compiled: CompiledVariant) -> bool:
    needed = max(function.cost.total_bytes for function in compiled.functions.values())
    if needed <= available_bytes():
        return True
    print(
        f"profile: warning: {compiled.variant.label}: not timed: needs {needed // _MIB:,} MiB, more than is free",
        file=sys.stderr,
    )
    return False
