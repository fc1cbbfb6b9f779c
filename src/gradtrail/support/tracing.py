"""Records a short part of what a process computes with JAX's profiler, for TensorBoard and Perfetto.

A trace has at most `RECORDED_SECONDS` and `LARGEST_BYTES`, however long the work takes: XLA records every operation of
every step, about 200,000 events a second.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax

RECORDED_SECONDS = 0.5
LARGEST_BYTES = 64 * 2**20  # limit of a trace; a larger one is discarded, and a shorter one recorded
_SHORTENING_FACTOR = 4
_SHORTEST_SECONDS = 1e-3


class Recorder:
    """Records calls of functions, from the second call of any of them on; a context manager.

    The first call is a warm-up: its recording is kept only if no function is called a second time. All calls during a
    recording are recorded, in all threads. The profiler is stopped after `seconds`, even within a call, and with the
    block at the latest. It is started and stopped in its own thread, which no signal interrupts.

    Args:
        folder: Folder to write to; it is empty until a recording ends.
        seconds: Longest recording.
        largest_bytes: Largest size of a recording.
    """

    def __init__(self, folder: Path, *, seconds: float = RECORDED_SECONDS, largest_bytes: int = LARGEST_BYTES):
        self._folder, self._seconds, self._largest_bytes = folder, seconds, largest_bytes
        self._calls = Counter[str]()
        self._is_warm = False
        self._number = 0  # number of the current recording; 0 for none
        self._count = 0
        self._timer: threading.Timer | None = None
        self._thread = ThreadPoolExecutor(1, "profiler")
        self._faults: list[Exception] = []
        self._kept: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._stop).result()
        self._thread.shutdown()

    @property
    def trace(self) -> Path | None:
        """After the block, the folder of the recording; None if nothing was called.

        `tensorboard --logdir` reads it, and Perfetto the `perfetto_trace.json.gz` in it.

        Raises:
            Exception: The profiler failed, and nothing was recorded.
        """
        if self._kept is None and self._faults:
            raise self._faults[0]
        return self._kept

    def recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `call` with its name in the trace."""

        def named(*args: Any) -> Any:
            self._before(name)
            with jax.profiler.TraceAnnotation(name):
                return call(*args)

        return named

    def _before(self, name: str) -> None:
        """Start at the first call, and again at the first second call of any function."""
        if self._is_warm:
            return
        self._calls[name] += 1
        self._is_warm = self._calls[name] > 1
        if self._is_warm or self._calls.total() == 1:
            self._thread.submit(self._start).result()

    def _start(self) -> None:
        self._stop()
        if self._faults:
            return
        self._count += 1
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # no calls of Python functions, which would hide the compiled ones
        folder = str(self._folder / str(self._count))
        if self._try(jax.profiler.start_trace, folder, create_perfetto_trace=True, profiler_options=options):
            self._number = self._count
            self._timer = threading.Timer(self._seconds, self._thread.submit, (self._stop, self._number))
            self._timer.daemon = True
            self._timer.start()

    def _stop(self, number: int | None = None) -> None:
        """Stop the current recording, or the one of that number, and keep it instead of the one before."""
        if not self._number or number not in (None, self._number):
            return
        written, self._number = self._folder / str(self._number), 0
        if self._timer:
            self._timer.cancel()
        if self._try(jax.profiler.stop_trace):
            if _num_bytes(written) <= self._largest_bytes:
                self._kept = written
            elif self._seconds > _SHORTEST_SECONDS:  # at the next call
                self._seconds /= _SHORTENING_FACTOR
                self._is_warm = False
        if self._kept != written:
            shutil.rmtree(written, ignore_errors=True)

    def _try(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
        """Call the profiler; return False if it fails, and keep its fault, which must not cost the work."""
        try:
            call(*args, **kwargs)
        except Exception as fault:  # of the profiler or the disk
            self._faults.append(fault)
            return False
        return True


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
