"""A process that answers with an exported model and says how long that took: `python -m ….probe start|steady FOLDER`.

Started anew for every measurement, as `measure` does; prints one line of JSON. Imports what answering needs, and
nothing else.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradtrail.stages.artifacts.exported import ExportedModel, read_export
from gradtrail.support.errors import UserError

BATCHES = (1, 32)  # images a request
_CALLS = {1: 2000, 32: 1000}  # of each, unless they take longer than `_SECONDS`
_SECONDS = 3.0  # of calls of one kind
_DIFFERENT = 16  # batches, taken in turns


def start(folder: Path) -> dict[str, float]:
    """Load a model and answer to one image; return when that was done, in seconds of the system's monotonic clock."""
    model = read_export(folder)
    model.predict(np.zeros((1, *model.manifest.image_shape), np.uint8))
    return {"answered": time.monotonic()}


def steady(folder: Path) -> dict[str, float]:
    """Load a model, compile every batch size, and answer again and again.

    Returns:
        `first_answer_ms`, of one image after compiling; `p50_ms_1` and so on; `calls_1` and `calls_32`, how many
        answers these are of; `images_per_second` at the largest batch size; `memory_mib`, the peak.
    """
    model = read_export(folder)
    for size in model.manifest.batch_sizes:
        model.compile(size)
    found = {"first_answer_ms": 1000 * _seconds(lambda: model.predict(_images(model, 1)[0]))}
    for size in model.manifest.batch_sizes:
        model.predict(_images(model, size)[0])
    for size in BATCHES:
        taken = 1000 * np.array(_timed(model, size, _CALLS[size]))
        found |= {f"p50_ms_{size}": float(np.quantile(taken, 0.5)), f"calls_{size}": len(taken)}
        found |= {f"p99_ms_{size}": float(np.quantile(taken, 0.99, method="higher"))}
    largest = model.manifest.batch_sizes[-1]
    taken = np.array(_timed(model, largest, 1_000_000, seconds=_SECONDS / 6))
    return found | {"images_per_second": largest * len(taken) / float(taken.sum()), "memory_mib": peak_memory_mib()}


def peak_memory_mib() -> float:
    """Return the largest resident memory that this process had.

    Not by `getrusage`: its maximum begins with that of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        import resource  # late: not on every system

        unit = 2**20 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _timed(model: ExportedModel, size: int, calls: int, seconds: float = _SECONDS) -> list[float]:
    """Return the seconds of each call, after a few that warm up."""
    batches = _images(model, size)
    for batch in batches[:3]:
        model.predict(batch)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < calls and (not taken or time.perf_counter() < end):
        batch = batches[len(taken) % _DIFFERENT]
        taken.append(_seconds(lambda batch=batch: model.predict(batch)))  # type: ignore[misc]
    return taken


def _images(model: ExportedModel, size: int) -> np.ndarray:
    shape = (_DIFFERENT, size, *model.manifest.image_shape)
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
