"""Logs what a stage compiled to its run in MLflow: three metrics, timings, tables, and the programs as text.

Out of scope: measuring, which `core/xla` does.
"""

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from gradtrail.core.profile.benchmark import MachineRates, measure_rates
from gradtrail.core.xla.compile_log import Compilation, CompileLog
from gradtrail.core.xla.compiler import CompiledFunction, Compiler, Wrapper
from gradtrail.stages.common.files import scratch_folder
from gradtrail.stages.common.setup import compute_in_float32, only_compiler, set_up_cache, take_cache_faults
from gradtrail.support.progress import ProgressBar
from gradtrail.support.tracing import recording
from gradtrail.tracking.live import LiveRun
from gradtrail.tracking.names import COMPILED, RECOMPILED, rounded

_MIB = 2**20
_MOST_WARNINGS = 20
Row = dict[str, Any]


@contextlib.contextmanager
def compiling(run: LiveRun) -> Iterator[Compiler]:
    """Yield the compiler of a stage; when the block ends without an error, log what was compiled. Changes no result.

    A stage compiles ahead of time, or computes on the host: a compilation that a call causes is a warning with the
    function's name and line of Python, and the argument that differs from the nearest program before.
    """

    def warn(compilation: Compilation) -> None:
        if log.unplanned[compilation] == 1 and len(log.unplanned) <= _MOST_WARNINGS:
            place = f" ({ProgressBar.last})" if ProgressBar.last else ""
            print(f"{run.stage.name}: warning: {compilation}{place}", file=sys.stderr)

    compute_in_float32()
    guard = only_compiler(set_up_cache()) if run.stage.runtime.compile_cache else None
    with _tracing(run) as wrapper, CompileLog(warn) as log:
        compiler = Compiler(time.perf_counter, guard, log, wrapper, run.stage.runtime.checkify)
        try:
            yield compiler
        finally:  # also if the stage fails
            num_rejected, lines = take_cache_faults()
            if (count := log.unplanned.total()) > _MOST_WARNINGS:
                lines.append(f"calls compiled {count} programs: see {RECOMPILED} of the run")
            for line in lines:
                print(f"{run.stage.name}: warning: {line}", file=sys.stderr)
    if run.is_open and compiler.functions:
        with run.best_effort():
            _log_profile(run, compiler, log, num_rejected)


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


def _log_profile(run: LiveRun, compiler: Compiler, log: CompileLog, num_rejected: int) -> None:
    """Log metrics, timings and the folder `compile/`: a table and the programs of each function's last compilation."""
    rates = measure_rates(time.perf_counter)
    functions = profile_rows(compiler.functions.values(), rates)
    cache = {"requests": log.requests, "hits": log.hits, "rejected": num_rejected, "unplanned": log.unplanned.total()}
    run.timings(
        functions=[_without_nan(row) for row in functions],
        cache=cache,
        compile_seconds=log.seconds,
        machine=dataclasses.asdict(rates),
        peak_device_bytes=(jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    )
    run.metrics(
        {
            "compile/total_seconds": sum(function.times.total_seconds for function in compiler.compiled),
            "compile/cache_hit_rate": log.hits / max(log.requests, 1),
            "compile/unplanned": log.unplanned.total(),
        }
    )
    with tempfile.TemporaryDirectory() as name:
        rows, calls = _summary(functions), [[*dataclasses.astuple(one), num] for one, num in log.unplanned.items()]
        tables = {RECOMPILED: {"columns": ["function", "line", "reason", "compilations"], "data": calls}}
        tables[COMPILED] = {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}
        for path, table in tables.items():
            Path(name, path.name).write_text(json.dumps(table), encoding="utf-8")
        for function in compiler.functions.values():
            for kind, text in function.texts().items():
                Path(name, f"{function.name}.{kind}.txt").write_text(text, encoding="utf-8")
        run.files(Path(name), COMPILED.parent.as_posix())


def profile_rows(functions: Iterable[CompiledFunction], rates: MachineRates) -> list[Row]:
    """Return a row per function: its costs and times, and its rates as shares of the machine's. NaN is unknown."""
    rows: list[Row] = []
    for function in functions:
        cost, steady = function.cost, function.calls.steady if function.calls else math.nan
        rows.append(
            {
                "function": function.name,
                **dataclasses.asdict(function.times),
                "first_call_seconds": function.calls.first if function.calls else math.nan,
                "steady_call_seconds": steady,
                "share_of_matmul_rate": cost.flops / steady / rates.flops_per_second,
                "share_of_copy_rate": cost.touched_bytes / steady / rates.bytes_per_second,
                **dataclasses.asdict(cost),
                "signature": function.signature,
            }
        )
    return rows


def _summary(functions: list[Row]) -> list[Row]:
    """Return a row for each function, for people, the slowest to compile first."""
    rows: list[Row] = [
        {
            "function": row["function"],
            "compile_seconds": row["trace_seconds"] + row["lower_seconds"] + row["compile_seconds"],
            "cached": row["cached"],
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
    return [
        {key: rounded(value) if isinstance(value, float) else value for key, value in _without_nan(row).items()}
        for row in rows
    ]


def _without_nan(row: Row) -> Row:
    """Return a row for JSON, which has no NaN."""
    return {key: None if value != value else value for key, value in row.items()}
