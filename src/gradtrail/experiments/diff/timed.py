"""Times the trainings of two runs: the code of their commits with their uncommitted changes, and their params."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradtrail.core.common.validation import POSITIVE, check_fields
from gradtrail.experiments.diff.sides import Side
from gradtrail.experiments.timed.checkout import check_out, scratch, write_params
from gradtrail.experiments.timed.main import Revision, time_revisions
from gradtrail.experiments.timed.ratio import Ratio
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.errors import UserError
from gradtrail.support.signals import stopping_on_signals

_IMAGES = re.compile(r"uint8\[(\d+),(\d+),(\d+)\]")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How to time two runs.

    Attributes:
        seconds: the budget.
        pythons: the interpreters of A and B.
    """

    seconds: float
    pythons: tuple[Path, Path]

    def __post_init__(self) -> None:
        check_fields(self, seconds=POSITIVE)


def time_runs(sides: Sequence[Side], timing: Timing) -> Ratio:
    """Time the trainings of two runs in turn, with the code, the params and the shapes of the data of each.

    Raises:
        UserError: the runs are of another stage, their code is not to be had, or does not run; one line.
    """
    with stopping_on_signals("stopped"), scratch() as folder:
        revisions = [
            _revision(f"{letter} ({side.name})", side, python, folder / letter)
            for letter, side, python in zip("AB", sides, timing.pythons, strict=True)
        ]
        return time_revisions(*revisions, seconds=timing.seconds, cache=folder / "cache")


def _revision(name: str, side: Side, python: Path, into: Path) -> Revision:
    if side.stage != TRAIN:
        raise UserError(f"{name}: a run of the stage {side.stage}; only trainings can be timed with --time")
    step = side.functions.get("train_step")
    images = _IMAGES.search(step.signature) if step else None
    if images is None:
        raise UserError(f"{name}: no compile profile says the shapes of its data; only a run that has one can be timed")
    count, height, width = map(int, images.groups())
    dirty = side.run.data.tags.get("git.dirty") == "true"
    if dirty and not side.diff:
        raise UserError(f"{name}: ran with changes that were not committed, and has no git.diff")
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


def interpreter(python: str | None, place: Path, option: str) -> Path:
    """Return the absolute path of an interpreter, this one for None.

    Args:
        python: a path, relative to `place`, or a command.
        place: the folder that a person stands in.
        option: for an error.

    Raises:
        UserError: there is none; one line.
    """
    if python is None:
        return Path(sys.executable)
    found = shutil.which(place / python if os.sep in python else python)
    if found is None:
        raise UserError(f"{option}: no interpreter of Python at {python!r} that can be run")
    return Path(found).absolute()  # not resolved: the link is what makes an environment
