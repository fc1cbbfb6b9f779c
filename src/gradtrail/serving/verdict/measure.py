"""Measures an exported model in fresh processes, so that no measurement warms up the next.

The unit is the process: answers within one process depend on each other, on where its memory lies, and on the load of
the machine, so thousands of them are not independent. Each process gives one value, such as its 99th percentile. The
result is their median; its interval is that of the order statistics which contain the median with at least 95 %,
whatever the distribution: the lowest and the highest of six (96.9 %). See `core/intervals.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import gradtrail
from gradtrail.core.intervals import median_interval
from gradtrail.serving.verdict.judge import Measured
from gradtrail.support.errors import UserError, printable
from gradtrail.support.progress import progress_bar

PROCESSES = 6  # per measurement: the fewest whose median has an interval
_PROBE = "gradtrail.serving.verdict.probe"
_TIMEOUT_SECONDS = 600  # of a process
COLD, WARM = "cold_start_seconds", "warm_start_seconds"


def measure(folder: Path, processes: int = PROCESSES) -> dict[str, Measured]:
    """Measure an exported model; takes a few seconds for each of three times `processes` processes.

    Starts with an empty compilation cache, starts with a full one, and steady processes alternate, so that a slowdown
    of the machine affects all three.

    Returns:
        `cold_start_seconds` and `warm_start_seconds`, from process start to first answer; and the values of
        `probe.steady`.

    Raises:
        UserError: A process failed; one line.
    """
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, progress_bar("Measuring", 3 * processes, unit="steps") as bar:
        warm = Path(name) / "warm"
        _probe("steady", folder, warm)  # fills the cache; its times do not count
        for number in range(processes):
            samples.setdefault(COLD, []).append(_start(folder, Path(name) / f"cold{number}"))
            bar.advance()
            samples.setdefault(WARM, []).append(_start(folder, warm))
            bar.advance()
            for key, value in _probe("steady", folder, warm).items():
                samples.setdefault(key, []).append(value)
            bar.advance()
    return {key: measured(values) for key, values in samples.items()}


def measured(values: Sequence[float]) -> Measured:
    """Return the median of the values of several processes, with its interval."""
    median = median_interval(values)
    how = f"median of {len(values)} processes, order statistics"
    return Measured(value=median.value, low=median.low, high=median.high, how=how, values=tuple(values))


def _start(folder: Path, cache: Path) -> float:
    """Return the seconds from the start of a process to its first answer."""
    began = time.monotonic()  # one clock for all processes of a system
    return _probe("start", folder, cache)["answered"] - began


def _probe(kind: str, folder: Path, cache: Path) -> dict[str, float]:
    command = [sys.executable, "-m", _PROBE, kind, str(folder.resolve())]
    try:
        result = subprocess.run(
            command, env=_environment(cache), capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{folder}: the model did not answer within {_TIMEOUT_SECONDS} s") from None
    if result.returncode != 0:
        message = printable((result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1])
        raise UserError(f"{folder}: the model cannot answer: {message[-300:]}")
    answer: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return answer


def _environment(cache: Path) -> Mapping[str, str]:
    source = str(Path(gradtrail.__file__ or "").resolve().parents[1])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
