"""Times the trainings of two revisions, or of two environments, against each other."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradtrail.experiments.timed.processes import Job, Program, cores, running
from gradtrail.experiments.timed.ratio import SIDES, Ratio, compare_times
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import stopping_on_signals


@dataclass(frozen=True, kw_only=True)
class Revision:
    """A training to time; the default sizes are those of MNIST."""

    name: str  # name in errors
    folder: Path  # folder with `src/` and `params.yaml`
    python: Path = Path(sys.executable)
    examples: int = 55_000  # number of training examples
    image_shape: tuple[int, int] = (28, 28)  # height and width in pixels
    classes: int = 10


def time_revisions(before: Revision, after: Revision, *, seconds: float, cache: Path) -> Ratio:
    """Time two trainings in turn.

    Args:
        before: Revision A.
        after: Revision B.
        seconds: Budget; see `compare_times`.
        cache: Folder for compiled programs.

    Raises:
        UserError: A training does not start, or does not compile.
    """
    programs = {side: program_of(revision, cache) for side, revision in zip(SIDES, (before, after), strict=True)}
    with (
        stopping_on_signals("stopped"),
        progress_bar("timing", seconds, unit="steps") as bar,
    ):
        started = time.monotonic()
        return compare_times(
            lambda: running(programs),
            budget=seconds,
            clock=time.monotonic,
            rng=np.random.default_rng(),
            note=lambda line: bar.update(min(seconds, round(time.monotonic() - started)), message=line),
        )


def program_of(revision: Revision, cache: Path) -> Program:
    """Return the program that times a revision."""
    job = Job(
        source=str((revision.folder / "src").resolve()),
        folder=str(revision.folder.resolve()),
        cache=str(cache.resolve()),
        examples=revision.examples,
        image_shape=revision.image_shape,
        classes=revision.classes,
        cores=cores(),
    )
    return Program(name=revision.name, python=revision.python, job=job)
