"""Orbax, imported late, and set up for a single process, even if several train."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from gradtrail.support.replaced import replaced


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Let Orbax wait for no other process in the block."""
    with replaced(jax, process_count=lambda: 1, process_index=lambda: 0):
        yield


def _context() -> Any:
    """Return a context in which Orbax' threads wait for no other process."""
    ocp, index = import_orbax(), jax.process_index()
    if jax.process_count() == 1:
        return ocp.Context()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    return ocp.Context(multiprocessing_options=alone)


def import_orbax() -> Any:
    """Import Orbax, late: it takes a second, and most trainings end before the first checkpoint is due.

    Its threads also log the errors that it raises, at length, and errors of other writes at that time; these logs are
    silenced.
    """
    from orbax.checkpoint import v1

    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if jax.process_count() > 1:  # its threads must not coordinate through process 0, which may have ended
        from orbax.checkpoint._src.futures import signaling_client as signals

        with single_process(), replaced(signals.multihost, is_jax_distributed_client_initialized=lambda: False):
            signals.get_signaling_client()  # the client is cached
    if not isinstance(sys.unraisablehook, _ReportUnlessLoopIsClosed):
        sys.unraisablehook = _ReportUnlessLoopIsClosed(sys.unraisablehook)
    return v1


class _ReportUnlessLoopIsClosed:
    """Reports unraisable exceptions, except those of TensorStore about an abandoned write."""

    def __init__(self, report: Callable[[Any], object]):
        self._report = report

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._report(unraisable)


def open_checkpointer(folder: Path, max_checkpoints: int) -> Any:
    """Open Orbax' manager of the checkpoints in a folder; it removes the incomplete ones of a killed process."""
    from orbax.checkpoint import checkpoint_manager as manager

    ocp, context = import_orbax(), _context()
    context.array.saving.use_compression = False  # a checkpoint is short-lived, and the processor is the training's
    folder.mkdir(parents=True, exist_ok=True)  # which Orbax refuses to do for one of several processes
    with replaced(manager, CheckpointManagerOptions=functools.partial(manager.CheckpointManagerOptions, create=False)):
        return ocp.training.Checkpointer(
            folder,
            context=context,
            preservation_policy=ocp.training.preservation_policies.LatestN(max_checkpoints),
            step_name_format=ocp.path.step.standard_name_format(step_prefix="step", step_format_fixed_length=9),
            cleanup_tmp_directories=True,
        )
