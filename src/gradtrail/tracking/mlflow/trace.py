"""A trace of some training steps by JAX's profiler, for ui.perfetto.dev, where `runtime.trace` asks for one."""

import tempfile
from pathlib import Path

import jax

from gradtrail.tracking.mlflow.run import Row


class StepTrace:
    """Records the second chunk of a training, the first being warm-up, and hands the files to the row.

    Args:
        row: that gets them, under `trace/`.
        wanted: whether to record at all.
    """

    def __init__(self, row: Row, wanted: bool):
        self._row = row
        self._folder = tempfile.TemporaryDirectory() if wanted else None
        self._chunks = 0

    def after_chunk(self, state: object) -> None:
        """Begin after the first chunk, end after the second, whose results are in `state`."""
        if self._folder is None:
            return
        self._chunks += 1
        if self._chunks == 1:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder.name, create_perfetto_trace=True)
        elif self._chunks == 2:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            for path in Path(self._folder.name).rglob("*perfetto_trace*"):
                self._row.files(path, "trace")
            self._folder.cleanup()
