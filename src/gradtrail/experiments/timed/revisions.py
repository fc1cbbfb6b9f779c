"""Times the trainings of two revisions of the code, or of two environments, against each other.

The code of a commit is unpacked into a temporary folder. Each side has a process; both live at the same time, and only
one of them works at a time.
"""

import ast
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradtrail.experiments.timed.ratio import SIDES, Ratio, TimedProcess, compare_times
from gradtrail.stages.common.params import PARAMS, changed, flatten
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import CommandError, git, git_bytes, unpack
from gradtrail.support.progress import progress_bar
from gradtrail.support.signals import stopping_on_signals
from gradtrail.tracking.tags import param_text

_WORKER = Path(__file__).with_name("worker.py")
_SECTIONS = ("train.", "environment.")  # sections of params.yaml that the compiled training depends on
_LONGEST_LINE = 300  # characters


@dataclass(frozen=True)
class Revision:
    """A training to time; the default sizes are those of MNIST."""

    name: str  # name in errors
    folder: Path  # folder with `src/` and `params.yaml`
    python: Path = Path(sys.executable)
    examples: int = 55_000  # number of training examples, whose pixels are random
    image_shape: Sequence[int] = (28, 28)  # height and width in pixels, and the channels of color images
    classes: int = 10


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty folder, which is removed at the end of the block, also on SIGTERM."""
    with stopping_on_signals("stopped"), tempfile.TemporaryDirectory(prefix="gradtrail-timed-") as folder:
        yield Path(folder).resolve()


def check_out(name: str, commit: str, into: Path, patch: str = "") -> Path:
    """Unpack a commit and apply a `git.diff`; return the project's folder in it. Raises UserError without either."""
    try:
        unpack(commit or "(none)", into, folder=git("rev-parse", "--show-toplevel"))
        if "diff --git " in patch:
            git_bytes("-C", str(into), "apply", "--whitespace=nowarn", stdin=patch.encode())
    except CommandError as error:
        raise UserError(f"{name}: commit {commit[:12] or 'unknown'} cannot be unpacked: {one_line(error)}") from None
    return into / git("rev-parse", "--show-prefix")


def write_params(folder: Path, recorded: Mapping[str, str]) -> None:
    """Set the training's params in a checkout to those of a run, given as texts by dotted key."""
    params = read_yaml(folder / PARAMS)
    changes = {
        key: _value(recorded[key])
        for key, value in flatten(params).items()
        if key.startswith(_SECTIONS) and key in recorded and param_text(value) != recorded[key]
    }
    (folder / PARAMS).write_text(json.dumps(changed(params, changes), indent=2), encoding="utf-8")


def _value(text: str) -> Any:
    """Return the value of a text that `param_text` returned."""
    try:
        return None if text == "null" else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def time_revisions(before: Revision, after: Revision, *, seconds: float, cache: Path) -> Ratio:
    """Time two trainings in turn; raise UserError if one does not compile. `cache` is a folder for programs."""
    with progress_bar("timing", seconds, unit="steps") as bar:
        started = time.monotonic()
        return compare_times(
            lambda: running({"A": before, "B": after}, cache),
            budget=seconds,
            clock=time.monotonic,
            rng=np.random.default_rng(),
            note=lambda line: bar.update(min(seconds, round(time.monotonic() - started)), message=line),
        )


@contextlib.contextmanager
def running(revisions: Mapping[str, Revision], cache: Path) -> Iterator[dict[str, TimedProcess]]:
    """Start a process of each side, and yield them once both have compiled; kill them in the end."""
    with contextlib.ExitStack() as stack:
        processes = {side: stack.enter_context(_process(revisions[side], cache)) for side in SIDES}
        yield {side: _timed(ask, steps_per_epoch=int(ask(""))) for side, ask in processes.items()}


def _timed(ask: Callable[[str], str], *, steps_per_epoch: int) -> TimedProcess:
    return TimedProcess(lambda steps: float(ask(f"{steps}\n")), steps_per_epoch)


@contextlib.contextmanager
def _process(revision: Revision, cache: Path) -> Iterator[Callable[[str], str]]:
    """Start the process of a side, and yield a function that sends it a request and returns the line of its answer.

    The function raises UserError, with the last line on stderr, if the process has ended.
    """
    values = asdict(revision) | {"folder": str(revision.folder.resolve()), "cache": str(cache)}
    command = [str(revision.python), "-u", str(_WORKER), json.dumps(values, default=str)]
    with tempfile.TemporaryFile("w+") as errors:
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process: Any = subprocess.Popen(command, **options, start_new_session=True)

        def ask(request: str) -> str:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            if answer := process.stdout.readline():
                return str(answer)
            status = process.wait()
            errors.seek(0)
            last = (errors.read().strip() or "no message").splitlines()[-1]
            message = f"its process ended with exit status {status}: {one_line(last)[:_LONGEST_LINE]}"
            raise UserError(f"{revision.name}: {message}")

        try:
            yield ask
        finally:
            process.kill()
            process.communicate()  # closes the pipes
