"""One of the two runs of a comparison: its artifacts in the store, and notes about missing ones."""

import contextlib
import json
import math
import re
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
from gradtrail.tracking.lookup import find_run
from gradtrail.tracking.mlflow.artifacts import download
from gradtrail.tracking.mlflow.stored_run import REBUILT, attempt_file

_ATTEMPT = re.compile(r"(.+)@(\d+)")
_COMPILE = "compile/"
_HLO = ".hlo.txt"


@dataclass(frozen=True)
class Function:
    """A function that a run compiled."""

    name: str  # name such as `train_step`
    numbers: Mapping[str, float]  # measured costs and times, by the keys of `functions` in `timings.json`
    cached: bool | None  # True if the machine code came from the compilation cache; None if unknown
    signature: str  # shapes and dtypes of the arguments


@dataclass(frozen=True)
class RunDetails:
    """A run and its artifacts."""

    label: str  # word by which the user referred to it
    run: Run
    attempt: int  # number of the execution whose times are read
    client: MlflowClient = field(repr=False)

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return str(self.run.data.tags["stage"])

    @property
    def name(self) -> str:
        """The name for messages."""
        attempts = int(self.run.data.tags.get("attempts", 1))
        attempt = f", attempt {self.attempt}" if attempts > 1 else ""
        return f"{self.run.info.run_name} {self.run.info.run_id[:8]}{attempt}"

    @cached_property
    def environment(self) -> dict[str, Any]:
        """`environment.json` of the attempt; empty if there is none."""
        return self._json(attempt_file("environment", self.attempt))

    @cached_property
    def timings(self) -> dict[str, Any]:
        """`timings.json` of the attempt; empty if there is none."""
        return self._json(attempt_file("timings", self.attempt))

    @cached_property
    def lineage(self) -> dict[str, Any]:
        """`lineage.json`: command, params and deps by stage."""
        return self._json("lineage.json")

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The compiled functions by name, in the order of compilation; empty without a profile."""
        return {row["function"]: _function(row) for row in self.timings.get("functions", ())}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of the attempt by part: imports, data, compile, compute, tracking; empty if unknown."""
        seconds: dict[str, float] = self.timings.get("seconds", {})
        if not seconds or self.timings.get("resumed"):
            return {}
        compiling = min(float(self.timings.get("compile_seconds", 0.0)), seconds["work"])
        parts = {"imports": seconds["imports"], "data": seconds["data"], "compile": compiling}
        return parts | {"compute": seconds["work"] - compiling, "tracking": seconds["tracking"]}

    @cached_property
    def diff(self) -> str:
        """The uncommitted changes of the run."""
        return self._text("git.diff")

    @property
    def commit(self) -> str:
        """The commit of the run; empty if none is recorded."""
        return str(self.run.data.tags.get("mlflow.source.git.commit", ""))

    def program(self, function: str) -> Program | None:
        """Return the optimized program of a function; None if none is stored."""
        text = self._text(f"{_COMPILE}{function}{_HLO}")
        return read_program(text) if text else None

    def missing_note(self) -> str:
        """Return a note about artifacts that this run does not have; empty if it has all."""
        tags = self.run.data.tags
        if REBUILT in tags:
            return f"{self.name} was rebuilt from its outputs: it has no times, programs or environment"
        if self.run.info.status == "RUNNING":
            return f"{self.name} is still running: times and programs are those of earlier attempts, if any"
        if not self.functions:
            return f"{self.name} has no compile profile"
        if self.timings.get("resumed"):
            return f"{self.name} resumed from a checkpoint: the seconds of that attempt cover only the rest"
        return ""

    def _json(self, path: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._text(path) or "{}")
        return content

    def _text(self, path: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            file = download(self.client, self.run.info.run_id, path, Path(folder))
            return file.read_text(encoding="utf-8", errors="replace") if file else ""


def find_details(word: str, runs: list[Run], client: MlflowClient, stage: str | None) -> RunDetails:
    """Return the run that a word refers to.

    Args:
        word: Argument of `find_run`; a suffix such as `@2` chooses the second execution of the state.
        runs: All runs of the store, the newest first.
        client: Client of the store.
        stage: Stage of the run if a commit or an experiment has several; None for the training.

    Raises:
        UserError: No run, or more than one, matches.
    """
    match = _ATTEMPT.fullmatch(word)
    name, attempt = (match[1], int(match[2])) if match else (word, None)
    run = find_run(name, runs, stage)
    attempts = int(run.data.tags.get("attempts", 1))
    if attempt is not None and not 1 <= attempt <= attempts:
        raise UserError(f"{one_line(word)[:100]}: the run has attempts 1 to {attempts}")
    return RunDetails(word, run, attempt or attempts, client)


def _function(row: Mapping[str, Any]) -> Function:
    numbers = {}
    for key, value in row.items():
        with contextlib.suppress(TypeError, ValueError):
            if key not in ("function", "cached", "signature") and not math.isnan(number := float(value)):
                numbers[key] = number
    cached = {"True": True, "False": False}.get(str(row.get("cached")))
    return Function(str(row["function"]), numbers, cached, str(row.get("signature", "")))
