"""Measures an exported model in fresh processes, so that no measurement warms up the next.

Answers within one process depend on each other, on where its memory lies, and on the load of the machine. So each
process, `python -m gradtrail.serving.probe start|steady FOLDER`, gives one value for each quantity, such as its 99th
percentile. Out of scope: the median of the processes and its interval, see `serving/verdict`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import gradtrail
from gradtrail.stages.model.exported import ExportedModel, read_export
from gradtrail.support.errors import UserError, printable

COLD, WARM = "cold_start_seconds", "warm_start_seconds"
_PROCESSES = 6  # per measurement: the fewest whose median has an interval
_CALLS = {1: 2000, 32: 1000}  # images per request → number of requests, unless they take longer than `_SECONDS`
_SECONDS = 3.0  # time for the calls of one batch size
_NUM_BATCHES = 16  # different batches, used in turn


def measure(folder: Path, processes: int = _PROCESSES) -> dict[str, list[float]]:
    """Return the values of the processes: `COLD` and `WARM`, from process start to first answer, and those of `steady`.

    Starts with an empty compilation cache, starts with a full one, and steady processes alternate, so that a slowdown
    of the machine affects all three. It takes a few seconds for each process.

    Raises:
        UserError: A process failed; one line.
    """
    from gradtrail.support.progress import progress_bar  # late: a probe imports only what answering needs

    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, progress_bar("Measuring", processes, unit="steps") as bar:
        warm = Path(name) / "warm"
        _probe("steady", folder, warm)  # fills the cache; its times do not count
        for number in range(processes):
            cold = _start_seconds(folder, Path(name) / f"cold{number}")
            measured = {COLD: cold, WARM: _start_seconds(folder, warm), **_probe("steady", folder, warm)}
            for quantity, value in measured.items():
                values.setdefault(quantity, []).append(value)
            bar.advance()
    return values


def _start_seconds(folder: Path, cache: Path) -> float:
    began = time.monotonic()  # one clock for all processes of a system
    return _probe("start", folder, cache)["answered"] - began


def _probe(kind: str, folder: Path, cache: Path) -> dict[str, float]:
    """Return what `start` or `steady` measures in a new process with this compilation cache."""
    source = str(Path(gradtrail.__file__ or "").resolve().parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH")))),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "gradtrail.serving.probe", kind, str(folder.resolve())]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        message = printable((result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1])
        raise UserError(f"{folder}: the model cannot answer: {message[-300:]}")
    answer: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return answer


def start(folder: Path) -> dict[str, float]:
    """Load a model and answer one image; return the time of the answer, in seconds of the system's monotonic clock."""
    model = read_export(folder)
    model.predict(np.zeros((1, *model.manifest.image_shape), np.uint8))
    return {"answered": time.monotonic()}


def steady(folder: Path) -> dict[str, float]:
    """Load a model, compile every batch size, and answer repeatedly; return latencies, throughput and peak memory."""
    from gradtrail.support.running_time import peak_memory_bytes  # late: `start` does without

    model = read_export(folder)
    shape, sizes = model.manifest.image_shape, model.manifest.batch_sizes
    for size in sizes:
        model.compile(size)
    began = time.perf_counter()
    model.predict(np.zeros((1, *shape), np.uint8))
    numbers = {"first_answer_ms": 1000 * (time.perf_counter() - began)}
    for size in sizes:
        model.predict(np.zeros((size, *shape), np.uint8))
    for size, calls in _CALLS.items():
        milliseconds = 1000 * _timed(model, size, calls, _SECONDS)
        numbers[f"p50_ms_{size}"] = float(np.quantile(milliseconds, 0.5))
        numbers[f"p99_ms_{size}"] = float(np.quantile(milliseconds, 0.99, method="higher"))
    numbers["images_per_second"] = sizes[-1] / float(np.mean(_timed(model, sizes[-1], 1_000_000, _SECONDS / 6)))
    return numbers | {"memory_mib": peak_memory_bytes() / 2**20}


def _timed(model: ExportedModel, size: int, calls: int, limit: float) -> np.ndarray:
    """Return the seconds of each call, after a few calls that warm up; at most `limit` seconds in all."""
    shape = (_NUM_BATCHES, size, *model.manifest.image_shape)
    batches = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for batch in batches[:3]:
        model.predict(batch)
    seconds: list[float] = []
    end = time.perf_counter() + limit
    while len(seconds) < calls and (began := time.perf_counter()) < end:
        model.predict(batches[len(seconds) % _NUM_BATCHES])
        seconds.append(time.perf_counter() - began)
    return np.array(seconds)


if __name__ == "__main__":
    try:
        print(json.dumps({"start": start, "steady": steady}[sys.argv[1]](Path(sys.argv[2]))))
    except UserError as error:
        sys.exit(str(error))
