"""Orbax, imported late, and as a single process uses it, whichever of several this is."""

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
def by_itself() -> Iterator[None]:
    """Have Orbax of this process wait for no other process while the block runs."""
    with replaced(jax, process_count=lambda: 1, process_index=lambda: 0):
        yield


def _context() -> Any:
    """Return a context with which Orbax' threads wait for no other process."""
    ocp, index = import_orbax(), jax.process_index()
    if jax.process_count() == 1:
        return ocp.Context()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    return ocp.Context(multiprocessing_options=alone)


def import_orbax() -> Any:
    """Import Orbax, late: it takes a second, and most trainings end before the first checkpoint is due.

    Its threads also log the errors that it raises, at length, and those of what was still being written when the first
    was raised: only the exceptions count here.
    """
    from orbax.checkpoint import v1

    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if jax.process_count() > 1:  # its threads shall not talk of their work by process 0, which may have ended
        from orbax.checkpoint._src.futures import signaling_client as signals

        with by_itself(), replaced(signals.multihost, is_jax_distributed_client_initialized=lambda: False):
            signals.get_signaling_client()  # which is kept
    if not isinstance(sys.unraisablehook, _ReportUnlessLoopIsClosed):
        sys.unraisablehook = _ReportUnlessLoopIsClosed(sys.unraisablehook)
    return v1


class _ReportUnlessLoopIsClosed:
    """Reports what no code can catch, but that TensorStore ends a write for which nobody waits any more."""

    def __init__(self, report: Callable[[Any], object]):
        self._report = report

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._report(unraisable)


def open_checkpointer(folder: Path, kept: int) -> Any:
    """Open Orbax' manager of the checkpoints in a folder; it removes the incomplete ones of a killed process."""
    from orbax.checkpoint import checkpoint_manager as manager

    ocp, context = import_orbax(), _context()
    context.array.saving.use_compression = False  # a checkpoint is short-lived, and the processor is the training's
    folder.mkdir(parents=True, exist_ok=True)  # which Orbax refuses to do for one of several processes
    with replaced(manager, CheckpointManagerOptions=functools.partial(manager.CheckpointManagerOptions, create=False)):
        return ocp.training.Checkpointer(
            folder,
            context=context,
            preservation_policy=ocp.training.preservation_policies.LatestN(kept),
            step_name_format=ocp.path.step.standard_name_format(step_prefix="step", step_format_fixed_length=9),
            cleanup_tmp_directories=True,
        )
