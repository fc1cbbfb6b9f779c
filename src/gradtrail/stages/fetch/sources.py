"""The section `fetch` of `params.yaml`: which data set, and where it is looked for."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.fetch import mnist_sources
from gradtrail.support.errors import NoSourceError

NO_SOURCE_FLAG = "GRADTRAIL_NO_SOURCE_FLAG"


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """The section `fetch` of `params.yaml`.

    Attributes:
        dataset: `mnist`, or `digits`: the 1,797 real digits that scikit-learn ships. One never stands in for the other.
    """

    dataset: Literal["mnist", "digits"]


def acquire(config: FetchConfig, to: Path, *, folder: Path | None, parts: Path, runtime: RuntimeConfig) -> None:
    """Write the four IDX files of the data set.

    Args:
        config: names the data set.
        to: an empty folder.
        folder: the folder that `MNIST_DIR` names, tried first; None where it is not set.
        parts: folder for what came of broken downloads, which the next attempt resumes.
        runtime: names the mirrors, and how long to wait for them.

    Raises:
        NoSourceError: no source of MNIST has all four files.
    """
    if config.dataset == "digits":
        mnist_sources.digits(to)
        return
    try:
        source = mnist_sources.acquire_mnist(
            to,
            folder=folder,
            mirrors=runtime.mirrors,
            openml=runtime.openml,
            parts=parts,
            timeout_seconds=runtime.download_timeout_seconds,
            report=_say,
        )
    except NoSourceError:
        _leave_word()
        raise
    _say(f"MNIST from {source}")


def _leave_word() -> None:
    """Tell `gradtrail repro`, where it is the one that runs us: DVC does not pass on a stage's exit status."""
    flag = os.environ.get(NO_SOURCE_FLAG)
    if flag:
        Path(flag).touch()


def _say(line: str) -> None:
    print(f"fetch: {line}", file=sys.stderr)
