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
from gradtrail.stages.common.setup import compute_in_float32, only_compiler, set_up_cache, take_cache_faults
from gradtrail.support.tracing import recording
from gradtrail.tracking.live import LiveRun
from gradtrail.tracking.names import COMPILED, rounded

_MIB = 2**20
Row = dict[str, Any]


@contextlib.contextmanager
def compiling(run: LiveRun) -> Iterator[Compiler]:
    """Yield the compiler of a stage; when the block ends without an error, log what was compiled. Changes no result.

    A stage compiles ahead of time, or computes on the host: a compilation that a call causes is a warning with the
    function's name, shapes and line of Python. So is a donated argument whose memory no result reuses.
    """
    compute_in_float32()
    guard = only_compiler(set_up_cache()) if run.stage.runtime.compile_cache else None
    process, started = psutil.Process(), time.perf_counter()
    rss_before = process.memory_info().rss
    with _tracing(run) as wrapper, CompileLog() as log:
        compiler = Compiler(time.perf_counter, guard, log, wrapper)
        try:
            yield compiler
        finally:  # also if the stage fails
            num_rejected, cache_warnings = take_cache_faults()
            for line in (*compiler.warnings, *cache_warnings):
                print(f"{run.stage.name}: warning: {line}", file=sys.stderr)
        seconds = time.perf_counter() - started
    if run.is_open and compiler.functions:
        with run.best_effort():
            memory = {"rss_before_mib": rss_before / _MIB, "rss_after_mib": process.memory_info().rss / _MIB}
            rest = {"cache_rejected": num_rejected, "share_of_time": log.seconds / seconds}
            _log_profile(run, compiler, log, rest | memory)


@contextlib.contextmanager
def _tracing(run: LiveRun) -> Iterator[Wrapper | None]:
    """Yield a wrapper of functions whose calls are recorded, and log `trace/`; None without `runtime.trace`."""
    stage = run.stage
    if not (stage.runtime.trace and run.is_open):
        yield None
        return
    with scratch_folder(stage.folder, f"{stage.name}-{stage.state[:16]}-trace") as folder:
        with recording(folder) as wrapper:
            yield wrapper
        if any(folder.iterdir()):
            run.files(folder, "trace")
        else:
            print(f"{stage.name}: runtime.trace: no trace: no compiled function was called twice", file=sys.stderr)


def _log_profile(run: LiveRun, compiler: Compiler, log: CompileLog, process: dict[str, float]) -> None:
    """Log metrics, timings and the folder `compile/`; `process` is what was measured of the whole stage.

    `functions.csv` has a row for each ahead-of-time compilation, `calls.csv` one for each that a call caused;
    `functions.json` and the programs are of the last compilation of each function.
    """
    rates = measure_rates(time.perf_counter)
    functions = profile_rows(compiler.functions.values(), rates)
    run.timings(
        functions=[_without_nan(row) for row in functions],
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
    process = {
        **{f"machine_{name}": value for name, value in dataclasses.asdict(rates).items()},
        **{f"cache_{name}": getattr(log, name) for name in ("requests", "hits", "misses")},
        "compilations": log.compilations,
        "unplanned": len(log.unplanned),
        **process,
        "live_arrays_mib": sum(array.nbytes for array in jax.live_arrays()) / _MIB,
    }
    on_device = jax.local_devices()[0].memory_stats() or {}
    names = {"bytes_in_use": "device_mib", "peak_bytes_in_use": "device_peak_mib"}
    process |= {name: on_device[key] / _MIB for key, name in names.items() if key in on_device}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "functions.csv", profile_rows(compiler.compiled, rates))
        columns = [field.name for field in dataclasses.fields(Compilation)]
        write_csv(folder / "calls.csv", [vars(compilation) for compilation in log.unplanned], columns)
        write_csv(folder / "process.csv", [{"quantity": key, "value": value} for key, value in process.items()])
        rows = _summary(functions, compiler, log)
        table = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        (folder / COMPILED.name).write_text(json.dumps(table), encoding="utf-8")
        for function in compiler.functions.values():
            for kind, text in function.texts().items():
                (folder / f"{function.name}.{kind}.txt").write_text(text, encoding="utf-8")
        run.files(folder, COMPILED.parent.as_posix())


def profile_rows(functions: Iterable[CompiledFunction], rates: MachineRates) -> list[Row]:
    """Return a row per function: its costs and times, and its rates as shares of the machine's. NaN is unknown."""
    rows: list[Row] = []
    for function in functions:
        steady = function.calls.steady if function.calls else math.nan
        flops_per_second, bytes_per_second = function.cost.flops / steady, function.cost.touched_bytes / steady
        rows.append(
            {
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
        )
    return rows


def _summary(functions: list[Row], compiler: Compiler, log: CompileLog) -> list[Row]:
    """Return a row for each function that was compiled, for people; the slowest to compile first.

    `retraces` counts the traces after the first, by calls too. A function that only calls compiled has no other values.
    """
    unplanned = Counter(compilation.function for compilation in log.unplanned)
    retraces = compiler.compilations - Counter(list(compiler.functions)) + unplanned
    rows: list[Row] = [
        {
            "function": row["function"],
            "compile_seconds": row["trace_seconds"] + row["lower_seconds"] + row["compile_seconds"],
            "cached": row["cached"],
            "retraces": retraces[row["function"]],
            "gflop": row["flops"] / 1e9,
            "data_dependent_loops": row["data_dependent_loops"],
            "ms_per_call": 1000 * row["steady_call_seconds"],
            "percent_of_matmul_rate": 100 * row["share_of_matmul_rate"],
            "percent_of_copy_rate": 100 * row["share_of_copy_rate"],
            "temporary_mib": row["temporary_bytes"] / _MIB,
            "total_mib": row["total_bytes"] / _MIB,
            "instructions": row["hlo_instructions"],
            "fusions": row["hlo_fusions"],
        }
        for row in functions
    ]
    rows.sort(key=lambda row: -row["compile_seconds"])
    by_calls = [name for name in unplanned if name not in compiler.functions]
    unknown: Row = dict.fromkeys(rows[0])
    rows += [unknown | {"function": name, "retraces": unplanned[name] - 1} for name in by_calls]
    return [
        {key: rounded(value) if isinstance(value, float) else value for key, value in _without_nan(row).items()}
        for row in rows
    ]


def _without_nan(row: Row) -> Row:
    """Return a row for JSON, which has no NaN."""
    return {key: None if value != value else value for key, value in row.items()}
