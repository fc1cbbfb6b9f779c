"""Times the trainings of two runs, with the code of their commits, their uncommitted changes, and their params."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gradtrail.core.config import Positive, config
from gradtrail.experiments.diff.sides import RunDetails
from gradtrail.experiments.timed.checkout import check_out, scratch, write_params
from gradtrail.experiments.timed.main import Revision, time_revisions
from gradtrail.experiments.timed.ratio import Ratio
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError
from gradtrail.support.signals import stopping_on_signals

_IMAGES = re.compile(r"uint8\[(\d+),(\d+),(\d+)\]")


@config
class Timing:
    """Options for timing two runs."""

    seconds: Positive  # budget
    pythons: tuple[Path, Path]  # interpreters of A and B


def time_runs(sides: Sequence[RunDetails], timing: Timing) -> Ratio:
    """Time the trainings of two runs in turn, with the code, the params and the data shapes of both runs.

    Raises:
        UserError: A run is not a training, its code is not available, or does not run.
    """
    with stopping_on_signals("stopped"), scratch() as folder:
        revisions = [
            _revision(f"{letter} ({side.name})", side, python, folder / letter)
            for letter, side, python in zip("AB", sides, timing.pythons, strict=True)
        ]
        return time_revisions(*revisions, seconds=timing.seconds, cache=folder / "cache")


def _revision(name: str, side: RunDetails, python: Path, into: Path) -> Revision:
    if side.stage != TRAIN:
        raise UserError(f"{name}: a run of the stage {side.stage}; only trainings can be timed with --time")
    step = side.functions.get("train_step")
    images = _IMAGES.search(step.signature) if step else None
    if images is None:
        raise UserError(f"{name}: without a compile profile the shapes of its data are unknown, so it cannot be timed")
    count, height, width = map(int, images.groups())
    dirty = side.run.data.tags.get("git.dirty") == "true"
    if dirty and not side.diff:
        raise UserError(f"{name}: ran with uncommitted changes, and has no git.diff")
    folder = check_out(name, side.commit, into, side.diff if dirty else "")
    write_params(folder, side.run.data.params)
    return Revision(
        name=name,
        folder=folder,
        python=python,
        examples=count,
        image_shape=(height, width),
        classes=int(side.timings["classes"]),
    )


def interpreter(python: str | None, folder: Path, option: str) -> Path:
    """Return the absolute path of an interpreter; None stands for this one.

    Args:
        python: Path relative to `folder`, or a command.
        folder: Folder in which the user ran the command.
        option: Option to name in errors.

    Raises:
        UserError: There is no such interpreter.
    """
    if python is None:
        return Path(sys.executable)
    path = shutil.which(folder / python if os.sep in python else python)
    if path is None:
        raise UserError(f"{option}: no interpreter of Python at {python!r} that can be run")
    return Path(path).absolute()  # not resolved: Python finds its environment by the link
