"""Logs what a stage compiled to its run in MLflow: three metrics, tables, and the programs as text.

Out of scope: measuring, which `core/xla` does.
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import pandas as pd
import psutil

from gradtrail.core.profile.benchmark import MachineRates, measure_rates
from gradtrail.core.xla.compile_log import Compilation, CompileLog
from gradtrail.core.xla.compiler import CompiledFunction, Compiler, Wrapper
from gradtrail.stages.common.files import scratch_folder
from gradtrail.stages.common.setup import only_compiler, set_up_cache
from gradtrail.support.errors import one_line
from gradtrail.support.tracing import Recorder
from gradtrail.tracking.mlflow.artifacts import COMPILED
from gradtrail.tracking.mlflow.run import TrackedRun

_MIB = 2**20


@contextlib.contextmanager
def compiling(run: TrackedRun) -> Iterator[Compiler]:
    """Yield the compiler of a stage; when the block ends without an error, log what was compiled. Changes no result.

    A compilation that a call causes in the block is a warning with the function's name, shapes and line of Python: a
    stage compiles ahead of time, or computes on the host. So is a donated argument whose memory no result reuses. The
    functions of the compiler itself never retrace: with another signature they raise TypeError.
    """
    runtime = run.stage.runtime
    guard = only_compiler(set_up_cache()) if runtime.compile_cache else None
    rss, started = _rss_mib(), time.perf_counter()
    with tracing(run) as wrapper, CompileLog() as log:
        compiler = Compiler(time.perf_counter, guard, log, wrapper)
        try:
            yield compiler
        finally:  # also if the stage fails
            for line in compiler.warnings:
                print(f"{run.stage.name}: warning: {line}", file=sys.stderr)
        seconds = time.perf_counter() - started
    if not run.is_open or not compiler.functions:
        return
    with run.best_effort():
        rates = measure_rates(time.perf_counter)
        table = profile_table(list(compiler.functions.values()), rates)
        run.timings(
            functions=json.loads(table.to_json(orient="records", double_precision=15)),
            cache={"requests": log.requests, "hits": log.hits, "unplanned": len(log.unplanned)},
            compile_seconds=log.seconds,
            machine=dataclasses.asdict(rates),
        )
        run.metrics(
            {
                "compile/total_seconds": sum(function.times.total_seconds for function in compiler.compiled),
                "compile/cache_hit_rate": log.hits / max(log.requests, 1),
                "compile/unplanned": len(log.unplanned),
            }
        )
        with tempfile.TemporaryDirectory() as folder:
            write_profile(Path(folder), compiler, rates, log)
            process = _rates(rates) | _log_counts(log, seconds) | _memory(rss)
            table = pd.DataFrame(process.items(), columns=["quantity", "value"])
            table.to_csv(Path(folder) / "process.csv", index=False)
            summary = summary_table(compiler, rates, log)
            text = summary.to_json(orient="split", index=False, double_precision=9)
            (Path(folder) / COMPILED.name).write_text(text, encoding="utf-8")
            run.files(Path(folder), COMPILED.parent.as_posix())


@contextlib.contextmanager
def tracing(run: TrackedRun) -> Iterator[Wrapper | None]:
    """Record calls of the stage's functions if `runtime.trace` is on, and log them as `trace/`.

    If the stage fails, nothing is logged; a fault of the profiler is a warning.

    Yields:
        The wrapper of functions to be recorded; None if none are.
    """
    stage = run.stage
    if not (stage.runtime.trace and run.is_open):
        yield None
        return
    with scratch_folder(stage.folder, f"{stage.name}-{stage.state[:16]}-trace") as folder:
        with Recorder(folder) as recorder:
            yield recorder.recording
        try:
            trace = recorder.trace
        except Exception as fault:  # of the profiler or the disk
            print(f"{stage.name}: warning: no trace was recorded ({one_line(fault)[:200]})", file=sys.stderr)
            return
        if trace is None:
            print(f"{stage.name}: runtime.trace: no trace: no compiled function was called", file=sys.stderr)
        else:
            run.files(trace, "trace")


def profile_table(functions: list[CompiledFunction], rates: MachineRates) -> pd.DataFrame:
    """Return a table with a row per function: its costs and times, and its rates as shares of the machine's."""
    rows = []
    for function in functions:
        steady = function.calls.steady if function.calls else float("nan")
        pace = {"flops": function.cost.flops / steady, "bytes": function.cost.touched_bytes / steady}
        rows.append(
            {
                "function": function.name,
                **dataclasses.asdict(function.times),
                "first_call_seconds": function.calls.first if function.calls else float("nan"),
                "steady_call_seconds": steady,
                "share_of_matmul_rate": pace["flops"] / rates.flops_per_second,
                "share_of_copy_rate": pace["bytes"] / rates.bytes_per_second,
                "flops_per_second": pace["flops"],
                "bytes_per_second": pace["bytes"],
                "arithmetic_intensity": function.cost.arithmetic_intensity,
                **dataclasses.asdict(function.cost),
                "signature": function.signature,
            }
        )
    return pd.DataFrame(rows)


def summary_table(compiler: Compiler, rates: MachineRates, log: CompileLog) -> pd.DataFrame:
    """Return a row for each function that was compiled, for people; the slowest to compile first.

    `retraces` counts the traces of a function after its first, those by calls included. A function that only calls
    compiled has no other values.
    """
    table = profile_table(list(compiler.functions.values()), rates)
    unplanned = Counter(compilation.function for compilation in log.unplanned)
    again = compiler.compilations - Counter(list(compiler.functions)) + unplanned
    result = pd.DataFrame(
        {
            "function": table["function"],
            "compile_seconds": table[["trace_seconds", "lower_seconds", "compile_seconds"]].sum(axis=1),
            "cached": table["cached"],
            "retraces": [again[name] for name in table["function"]],
            "gflop": table["flops"] / 1e9,
            "data_dependent_loops": table["data_dependent_loops"],
            "ms_per_call": table["steady_call_seconds"] * 1000,
            "percent_of_matmul_rate": table["share_of_matmul_rate"] * 100,
            "percent_of_copy_rate": table["share_of_copy_rate"] * 100,
            "temporary_mib": table["temporary_bytes"] / _MIB,
            "total_mib": table["total_bytes"] / _MIB,
            "instructions": table["hlo_instructions"],
            "fusions": table["hlo_fusions"],
        }
    ).sort_values("compile_seconds", ascending=False, ignore_index=True)
    uncompiled = [name for name in unplanned if name not in compiler.functions]
    by_calls = pd.DataFrame({"function": uncompiled, "retraces": [unplanned[name] - 1 for name in uncompiled]})
    return pd.concat([result, by_calls], ignore_index=True) if uncompiled else result


def write_profile(folder: Path, compiler: Compiler, rates: MachineRates, log: CompileLog) -> None:
    """Write the compile profile to a folder.

    `functions.csv` has a row for each ahead-of-time compilation, variants and repeated ones included, `calls.csv` one
    for each compilation that a call caused; the programs' texts are those of `compiler.functions`.
    """
    profile_table(compiler.compiled, rates).to_csv(folder / "functions.csv", index=False)
    columns = [field.name for field in dataclasses.fields(Compilation)]
    pd.DataFrame(map(dataclasses.astuple, log.unplanned), columns=columns).to_csv(folder / "calls.csv", index=False)
    for function in compiler.functions.values():
        for kind, text in function.texts().items():
            (folder / f"{function.name}.{kind}.txt").write_text(text, encoding="utf-8")


def _rates(rates: MachineRates) -> dict[str, float]:
    return {f"machine_{name}": value for name, value in dataclasses.asdict(rates).items()}


def _log_counts(log: CompileLog, seconds: float) -> dict[str, float]:
    return {
        "cache_requests": log.requests,
        "cache_hits": log.hits,
        "cache_misses": log.misses,
        "compilations": log.compilations,
        "unplanned": len(log.unplanned),
        "share_of_time": log.seconds / seconds,
    }


def _memory(rss_before: float) -> dict[str, float]:
    values = {"rss_before_mib": rss_before, "rss_after_mib": _rss_mib()}
    values["live_arrays_mib"] = sum(array.nbytes for array in jax.live_arrays()) / _MIB
    stats = jax.local_devices()[0].memory_stats() or {}
    names = {"bytes_in_use": "device_mib", "peak_bytes_in_use": "device_peak_mib"}
    return values | {name: stats[key] / _MIB for key, name in names.items() if key in stats}


def _rss_mib() -> float:
    return float(psutil.Process().memory_info().rss) / _MIB
