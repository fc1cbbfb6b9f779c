"""One of the two runs that are compared: all that the store has of it, and words for what it lacks."""

import contextlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.experiments.diff.hlo import Program, read_program
from gradtrail.support.errors import UserError, one_line
from gradtrail.tracking.lookup.runs import find_run
from gradtrail.tracking.mlflow.artifacts import download
from gradtrail.tracking.mlflow.stored_run import REBUILT, attempt_file

_ATTEMPT = re.compile(r"(.+)@(\d+)")
_COMPILE = "compile/"
_HLO = ".hlo.txt"


@dataclass(frozen=True)
class Function:
    """A function that a run compiled.

    Attributes:
        name: such as `train_step`.
        numbers: costs and times, by the keys of `functions` in `timings.json`; those that were not measured are absent.
        cached: whether the machine code came from the compilation cache; None where that is unknown.
        signature: shapes and dtypes of the arguments.
    """

    name: str
    numbers: Mapping[str, float]
    cached: bool | None
    signature: str


@dataclass(frozen=True)
class Side:
    """A run, and what its artifacts say.

    Attributes:
        label: what the user called it.
        run: of MLflow.
        attempt: which execution of its state is meant: times are of that one.
        client: of the store.
    """

    label: str
    run: Run
    attempt: int
    client: MlflowClient = field(repr=False)

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return str(self.run.data.tags["stage"])

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        attempts = int(self.run.data.tags.get("attempts", 1))
        attempt = f", attempt {self.attempt}" if attempts > 1 else ""
        return f"{self.run.info.run_name} {self.run.info.run_id[:8]}{attempt}"

    @cached_property
    def environment(self) -> dict[str, Any]:
        """`environment.json` of the attempt; empty where there is none."""
        return self._json(attempt_file("environment", self.attempt))

    @cached_property
    def timings(self) -> dict[str, Any]:
        """`timings.json` of the attempt; empty where there is none."""
        return self._json(attempt_file("timings", self.attempt))

    @cached_property
    def lineage(self) -> dict[str, Any]:
        """`lineage.json`: stage → what determines its outs."""
        return self._json("lineage.json")

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The compiled functions by name, in the order in which they were compiled; empty without a profile."""
        return {row["function"]: _function(row) for row in self.timings.get("functions", ())}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Where the seconds of the attempt went: imports, data, compile, compute, tracking; empty where unknown."""
        of: dict[str, float] = self.timings.get("seconds", {})
        if not of or self.timings.get("resumed"):
            return {}
        compiled = min(float(self.timings.get("compile_seconds", 0.0)), of["work"])
        found = {"imports": of["imports"], "data": of["data"], "compile": compiled, "compute": of["work"] - compiled}
        return found | {"tracking": of["tracking"]}

    @cached_property
    def diff(self) -> str:
        """The uncommitted changes that it ran with."""
        return self._text("git.diff")

    @property
    def commit(self) -> str:
        """The commit that it ran; empty where none is recorded."""
        return str(self.run.data.tags.get("mlflow.source.git.commit", ""))

    def program(self, function: str) -> Program | None:
        """Return the optimized program of a function; None where none is stored, or it cannot be read: a warning."""
        if not (text := self._text(f"{_COMPILE}{function}{_HLO}")):
            return None
        try:
            return read_program(text, f"{self.name}: {_COMPILE}{function}{_HLO}")
        except UserError as error:
            print(f"warning: {error}", file=sys.stderr)
            return None

    def lacks(self) -> str:
        """Return what a comparison has to do without, in words; or nothing."""
        tags = self.run.data.tags
        if REBUILT in tags:
            return f"{self.name} was rebuilt from its outs: no times, programs or environment of its own"
        if self.run.info.status == "RUNNING":
            return f"{self.name} is still running: times and programs are those of attempts before, if any"
        if not self.functions:
            return f"{self.name} has no compile profile"
        if self.timings.get("resumed"):
            return f"{self.name} went on from a checkpoint: the seconds of that attempt are those of the rest alone"
        return ""

    def _json(self, path: str) -> dict[str, Any]:
        try:
            content = json.loads(self._text(path) or "{}")
        except ValueError as error:
            print(f"warning: {self.name}: {path} is damaged: {one_line(error)}", file=sys.stderr)
            return {}
        return content if isinstance(content, dict) else {}

    def _text(self, path: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            found = download(self.client, self.run.info.run_id, path, Path(folder))
            return found.read_text(encoding="utf-8", errors="replace") if found else ""


def find_side(what: str, runs: list[Run], client: MlflowClient, stage: str | None) -> Side:
    """Return the run that a word refers to.

    Args:
        what: what `find_run` takes; with `@2` behind it, the second
            execution of its state.
        runs: all runs of the store, the newest first.
        client: of the store.
        stage: of the run to take where a commit or an experiment has several; None for the training.

    Raises:
        UserError: there is none, or more than one; one line.
    """
    match = _ATTEMPT.fullmatch(what)
    name, attempt = (match[1], int(match[2])) if match else (what, None)
    found = find_run(name, runs, stage)
    attempts = int(found.data.tags.get("attempts", 1))
    if attempt is not None and not 1 <= attempt <= attempts:
        raise UserError(f"{one_line(what)[:100]}: the run has attempts 1 to {attempts}")
    return Side(what, found, attempt or attempts, client)


def _function(row: Mapping[str, Any]) -> Function:
    numbers = {}
    for key, value in row.items():
        with contextlib.suppress(TypeError, ValueError):
            if key not in ("function", "cached", "signature") and not math.isnan(number := float(value)):
                numbers[key] = number
    cached = {"True": True, "False": False}.get(str(row.get("cached")))
    return Function(str(row["function"]), numbers, cached, str(row.get("signature", "")))
