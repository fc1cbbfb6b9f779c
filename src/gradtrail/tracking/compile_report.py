"""Logs what a stage compiled to its run in MLflow: three metrics, tables, and the programs as text.

Out of scope: measuring, which `core/xla` does.
"""

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import psutil

from gradtrail.core.profile.benchmark import MachineRates, measure_rates
from gradtrail.core.xla.compile_log import Compilation, CompileLog
from gradtrail.core.xla.compiler import CompiledFunction, Compiler, Wrapper
from gradtrail.stages.common.files import scratch_folder, write_csv
from gradtrail.stages.common.setup import only_compiler, set_up_cache
from gradtrail.support.errors import one_line
from gradtrail.support.tracing import Recorder
from gradtrail.tracking.journal import Journal
from gradtrail.tracking.mlflow.naming import COMPILED

_MIB = 2**20
Row = dict[str, Any]


@contextlib.contextmanager
def compiling(run: Journal) -> Iterator[Compiler]:
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
        run.timings(
            functions=profile_rows(compiler.functions.values(), rates),
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
            quantities = [{"quantity": name, "value": value} for name, value in process.items()]
            write_csv(Path(folder) / "process.csv", quantities)
            rows = summary_rows(compiler, rates, log)
            table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
            (Path(folder) / COMPILED.name).write_text(json.dumps(table), encoding="utf-8")
            run.files(Path(folder), COMPILED.parent.as_posix())


@contextlib.contextmanager
def tracing(run: Journal) -> Iterator[Wrapper | None]:
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


def profile_rows(functions: Iterable[CompiledFunction], rates: MachineRates) -> list[Row]:
    """Return a row per function: its costs and times, and its rates as shares of the machine's. None is unknown."""
    rows: list[Row] = []
    for function in functions:
        steady = function.calls.steady if function.calls else math.nan
        flops_per_second, bytes_per_second = function.cost.flops / steady, function.cost.touched_bytes / steady
        row = {
            "function": function.name,
            **dataclasses.asdict(function.times),
            "first_call_seconds": function.calls.first if function.calls else math.nan,
            "steady_call_seconds": steady,
            "share_of_matmul_rate": flops_per_second / rates.flops_per_second,
            "share_of_copy_rate": bytes_per_second / rates.bytes_per_second,
            "flops_per_second": flops_per_second,
            "bytes_per_second": bytes_per_second,
            "arithmetic_intensity": function.cost.arithmetic_intensity,
            **dataclasses.asdict(function.cost),
            "signature": function.signature,
        }
        rows.append({key: None if value != value else value for key, value in row.items()})
    return rows


def summary_rows(compiler: Compiler, rates: MachineRates, log: CompileLog) -> list[Row]:
    """Return a row for each function that was compiled, for people; the slowest to compile first.

    `retraces` counts the traces of a function after its first, those by calls included. A function that only calls
    compiled has no other values.
    """
    unplanned = Counter(compilation.function for compilation in log.unplanned)
    again = compiler.compilations - Counter(list(compiler.functions)) + unplanned
    rows: list[Row] = [
        {
            "function": row["function"],
            "compile_seconds": row["trace_seconds"] + row["lower_seconds"] + row["compile_seconds"],
            "cached": row["cached"],
            "retraces": again[row["function"]],
            "gflop": row["flops"] / 1e9,
            "data_dependent_loops": row["data_dependent_loops"],
            "ms_per_call": _scaled(row["steady_call_seconds"], 1000),
            "percent_of_matmul_rate": _scaled(row["share_of_matmul_rate"], 100),
            "percent_of_copy_rate": _scaled(row["share_of_copy_rate"], 100),
            "temporary_mib": row["temporary_bytes"] / _MIB,
            "total_mib": row["total_bytes"] / _MIB,
            "instructions": row["hlo_instructions"],
            "fusions": row["hlo_fusions"],
        }
        for row in profile_rows(compiler.functions.values(), rates)
    ]
    rows.sort(key=lambda row: -row["compile_seconds"])
    by_calls = [name for name in unplanned if name not in compiler.functions]
    unknown: Row = dict.fromkeys(rows[0])
    return rows + [unknown | {"function": name, "retraces": unplanned[name] - 1} for name in by_calls]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def write_profile(folder: Path, compiler: Compiler, rates: MachineRates, log: CompileLog) -> None:
    """Write the compile profile to a folder.

    `functions.csv` has a row for each ahead-of-time compilation, variants and repeated ones included, `calls.csv` one
    for each compilation that a call caused; the programs' texts are those of `compiler.functions`.
    """
    write_csv(folder / "functions.csv", profile_rows(compiler.compiled, rates))
    columns = [field.name for field in dataclasses.fields(Compilation)]
    write_csv(folder / "calls.csv", [vars(compilation) for compilation in log.unplanned], columns)
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
