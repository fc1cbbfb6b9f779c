"""A process that measures how fast an exported model answers: `python -m ….probe start|steady FOLDER`.

`measure` starts a new one for every measurement; it prints one line of JSON, and imports only what answering needs.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradtrail.stages.artifacts.exported import ExportedModel, read_export
from gradtrail.support.errors import UserError

BATCHES = (1, 32)  # images per request
_CALLS = {1: 2000, 32: 1000}  # number of calls, unless they take longer than `_SECONDS`
_SECONDS = 3.0  # time for the calls of one batch size
_NUM_BATCHES = 16  # different batches, used in turn


def start(folder: Path) -> dict[str, float]:
    """Load a model and answer one image; return the time of the answer, in seconds of the system's monotonic clock."""
    model = read_export(folder)
    model.predict(np.zeros((1, *model.manifest.image_shape), np.uint8))
    return {"answered": time.monotonic()}


def steady(folder: Path) -> dict[str, float]:
    """Load a model, compile every batch size, and answer repeatedly.

    Returns:
        `first_answer_ms`, for one image after compiling; `p50_ms_1` and so on; `calls_1` and `calls_32`, the number of
        answers behind these; `images_per_second` at the largest batch size; `memory_mib`, the peak.
    """
    model = read_export(folder)
    for size in model.manifest.batch_sizes:
        model.compile(size)
    numbers = {"first_answer_ms": 1000 * _seconds(lambda: model.predict(_images(model, 1)[0]))}
    for size in model.manifest.batch_sizes:
        model.predict(_images(model, size)[0])
    for size in BATCHES:
        milliseconds = 1000 * np.array(_timed(model, size, _CALLS[size]))
        numbers |= {f"p50_ms_{size}": float(np.quantile(milliseconds, 0.5)), f"calls_{size}": len(milliseconds)}
        numbers |= {f"p99_ms_{size}": float(np.quantile(milliseconds, 0.99, method="higher"))}
    largest = model.manifest.batch_sizes[-1]
    seconds = np.array(_timed(model, largest, 1_000_000, limit=_SECONDS / 6))
    numbers["images_per_second"] = largest * len(seconds) / float(seconds.sum())
    return numbers | {"memory_mib": peak_memory_mib()}


def peak_memory_mib() -> float:
    """Return the peak resident memory of this process.

    Not by `getrusage`: its maximum includes that of the parent process.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        import resource  # late: not on every system

        unit = 2**20 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _timed(model: ExportedModel, size: int, calls: int, limit: float = _SECONDS) -> list[float]:
    """Return the seconds of each call, after a few calls that warm up; at most `limit` seconds in all."""
    batches = _images(model, size)
    for batch in batches[:3]:
        model.predict(batch)
    seconds: list[float] = []
    end = time.perf_counter() + limit
    while len(seconds) < calls and (not seconds or time.perf_counter() < end):
        batch = batches[len(seconds) % _NUM_BATCHES]
        seconds.append(_seconds(lambda batch=batch: model.predict(batch)))  # type: ignore[misc]
    return seconds


def _images(model: ExportedModel, size: int) -> np.ndarray:
    shape = (_NUM_BATCHES, size, *model.manifest.image_shape)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    try:
        print(json.dumps({"start": start, "steady": steady}[sys.argv[1]](Path(sys.argv[2]))))
    except UserError as error:
        sys.exit(str(error))
