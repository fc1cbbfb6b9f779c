"""`gradtrail diff A B`: what differs between two runs of one stage.

Metrics; params, versions, data and code; the seconds of each part of the stage, and its memory; costs and times of
each compiled function, and where the texts of its programs are. With `--time` both trainings run again, in turn. Out of
scope: which difference caused another.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

from gradtrail.experiments.timed.ratio import Ratio
from gradtrail.experiments.timed.revisions import Revision, check_out, scratch, time_revisions, write_params
from gradtrail.stages.common.params import flatten
from gradtrail.stages.common.pipeline_file import TRAIN, is_code
from gradtrail.support.errors import UserError, one_line
from gradtrail.support.git import git
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import TextTable, duration, markdown_table
from gradtrail.tracking.artifacts import read_artifact
from gradtrail.tracking.find_run import find_run
from gradtrail.tracking.runs import RunIndex
from gradtrail.tracking.ship import attempt_file
from gradtrail.tracking.store import open_store
from gradtrail.tracking.tags import REBUILT

Rows = list[dict[str, Any]]

_MOST_KEYS = 4  # params that a sentence names
_COSTS = {
    "flops": "FLOPs",
    "bytes_accessed": "bytes",
    "temporary_bytes": "temporaries",
    "hlo_instructions": "instructions",
    "hlo_fusions": "fusions",
    "compile_seconds": "compile, s",
}
_PROGRAM = "compile/{}.hlo.txt"  # artifact: the optimized program of a function
_PEAKS = ("peak_memory_bytes", "peak_device_bytes")
_OTHER = re.compile(
    r"(system|steps)/.*|.*/(compile_\w+|goodput|\w*seconds\w*)"
)  # metrics that are no results, or in other tables
_ABSENT = "–"
_MOST_CAUSES = 3  # of seconds, that a sentence names
_UNNAMED = re.compile(  # what says nothing about what a line of a program does
    r"/\*.*?\*/|, metadata=\{(?:[^{}\"]|\"[^\"]*\")*\}|, backend_config=\{.*\}"
)
_NAME = re.compile(r"%[\w.-]+")
_SOURCE_LINE = re.compile(r"\w+|\d+ [\"{].*|")  # a line of the tables of source lines, or an empty one
_IMAGES = re.compile(r"uint8\[(\d+),(\d+),(\d+)(?:,([1-4]))?\]")  # a split, grayscale or with up to four channels


@dataclass(frozen=True)
class RunDetails:
    """A run and its artifacts."""

    run: Run
    attempt: int  # number of the execution whose times are read
    client: MlflowClient

    @property
    def stage(self) -> str:
        return str(self.run.data.tags["stage"])

    @property
    def name(self) -> str:
        attempt = f", attempt {self.attempt}" if int(self.run.data.tags.get("attempts", 1)) > 1 else ""
        return f"{self.run.info.run_name} {self.run.info.run_id[:8]}{attempt}"

    @property
    def commit(self) -> str:
        return str(self.run.data.tags.get("mlflow.source.git.commit", ""))

    @cached_property
    def patch(self) -> str:
        """Uncommitted changes, as git's diff."""
        return self._text("git.diff")

    @cached_property
    def environment(self) -> dict[str, str]:
        """Facts about machine, system, versions and switches, by dotted key; empty if the run has none."""
        facts = flatten(self._json(attempt_file("environment", self.attempt)))
        return {key: str(value) for key, value in facts.items()}

    @cached_property
    def timings(self) -> dict[str, Any]:
        return self._json(attempt_file("timings", self.attempt))

    @property
    def results(self) -> dict[str, float]:
        """Last values of the metrics that are results, by name: no times, and no load of the machine."""
        return {name: value for name, value in sorted(self.run.data.metrics.items()) if not _OTHER.fullmatch(name)}

    @property
    def memory(self) -> dict[str, float]:
        """Peak bytes of the process and of an accelerator, of which a CPU has none."""
        return {name: peak for name in _PEAKS if (peak := self.timings.get(name))}

    @cached_property
    def functions(self) -> dict[str, dict[str, Any]]:
        """Measured costs and times of each compiled function, in the order of compilation."""
        return {row["function"]: row for row in self.timings.get("functions", ())}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the attempt and those that it resumed, by cause; empty if they are unknown."""
        seconds: dict[str, float] = self.timings.get("seconds", {})
        if seconds and "compile" not in seconds:  # only a training counts it apart
            compiling = min(float(self.timings.get("compile_seconds", 0.0)), seconds["other"])
            return seconds | {"compile": compiling, "other": seconds["other"] - compiling}
        return seconds

    @cached_property
    def num_cached(self) -> int:
        """Number of functions that came from the compilation cache."""
        return sum(bool(row.get("cached")) for row in self.functions.values())

    def deps(self, *, code: bool) -> dict[str, str]:
        """Return the deps of the stage that are code, or those that are data, path → digest."""
        deps: dict[str, str] = self._json("lineage.json").get(self.stage, {}).get("deps", {})
        return {path: md5[:12] for path, md5 in deps.items() if is_code(path) == code}

    def program(self, function: str) -> str:
        """Return the optimized program of a function, as text; empty if none is stored."""
        return self._text(_PROGRAM.format(function))

    @property
    def missing_note(self) -> str:
        """A note about artifacts that this run does not have; empty if it has all."""
        if REBUILT in self.run.data.tags:
            return f"{self.name} was rebuilt from its outputs: it has no times, programs or environment"
        if not self.functions:
            return f"{self.name} has no compile profile"
        return ""

    def _json(self, path: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._text(path) or "{}")
        return content

    def _text(self, path: str) -> str:
        return read_artifact(self.client, self.run.info.run_id, path)


def find_details(words: Sequence[str], stage: str | None) -> list[RunDetails]:
    """Return the runs that words refer to; raise UserError if one matches no run, or if their stages are different.

    Words are those of `find_run`; a suffix such as `@2` chooses the second execution of the state. With a stage, a word
    for a training stands for that stage's run.
    """
    client = open_store()
    index, sides = RunIndex(client), []
    for word in words:
        match = re.fullmatch(r"(.+)@(\d+)", word)
        run = find_run(match[1] if match else word, index, stage)
        attempts = int(run.data.tags.get("attempts", 1))
        attempt = int(match[2]) if match else attempts
        if not 1 <= attempt <= attempts:
            raise UserError(f"{one_line(word)[:100]}: the run has attempts 1 to {attempts}")
        sides.append(RunDetails(run, attempt, client))
    if len({side.stage for side in sides}) > 1:
        stages = " and ".join(side.stage for side in sides)
        raise UserError(f"the runs are of the stages {stages}; `--stage {sides[0].stage}` compares those of one stage")
    return sides


def difference_tables(before: RunDetails, after: RunDetails) -> dict[str, Rows]:
    """Return the differences of two runs as tables of plain values, title → rows."""
    environments = (before.environment, after.environment) if before.environment and after.environment else ({}, {})
    return {
        "metrics": _compared("metric", before.results, after.results),
        "params": _differing(before.run.data.params, after.run.data.params),
        "environment": _differing(*environments),
        "data": _differing(before.deps(code=False), after.deps(code=False)),
        "code": [{"changed": path} for path in _changed_code(before, after)],
        "seconds": _seconds(before, after),
        "memory": _compared("memory", before.memory, after.memory),
        "functions": _functions(before, after),
    }


def diff(
    before: str, after: str, stage: str | None, *, form: str | None, pythons: Sequence[Path] | None, seconds: float
) -> None:
    """Compare two runs, given as words for `find_details`, and print the differences, in the form `json` or `markdown`.

    With `pythons`, the interpreters of A and B, the trainings are timed too, in at most some seconds.
    """
    sides = find_details((before, after), stage)
    tables = difference_tables(*sides)
    notes = [note for side in sides if (note := side.missing_note)]
    ratio = time_runs(sides, pythons, seconds) if pythons else None
    console = stdout_console()
    if form == "json":
        runs = [{"id": side.run.info.run_id, "name": side.run.info.run_name, "attempt": side.attempt} for side in sides]
        timed = {"timed": asdict(ratio)} if ratio else {}
        console.print(json.dumps({"runs": runs, "notes": notes} | tables | timed, indent=2), soft_wrap=True)
        return
    names = [f"{letter}  {side.name}" for letter, side in zip("AB", sides, strict=True)]
    headline = [_headline(tables["seconds"], *sides)] if tables["seconds"] else []
    lines = [*([_attribution(tables, *sides)] if headline else []), *notes]
    lines += [f"timed: {ratio.describe()}"] if ratio else []
    cells = {
        title: [{key: _cell(value, is_time=title == "seconds") for key, value in row.items()} for row in rows]
        for title, rows in tables.items()
        if rows
    }
    if form == "markdown":
        print("\n\n".join([*names, *headline, *lines, *(f"### {k}\n\n{markdown_table(v)}" for k, v in cells.items())]))
        return
    for line in (*names, *headline, *lines):
        console.print(line, style="bold" if line in headline else None)
    for title, rows in cells.items():
        numeric = [key for key, value in tables[title][0].items() if not isinstance(value, str)]
        console.print(TextTable(title, rows, right=numeric))
    for function in (row["function"] for row in tables["functions"] if row["program"] == "other"):
        uris = (f"  {side.run.info.artifact_uri}/{_PROGRAM.format(function)}" for side in sides)
        console.print(f"programs of {function}:", *uris, sep="\n", soft_wrap=True)


def time_runs(sides: Sequence[RunDetails], pythons: Sequence[Path], seconds: float) -> Ratio:
    """Time the trainings of two runs in turn, with the code, the params and the data shapes of both runs."""
    with scratch() as folder:
        revisions = []
        for letter, side, python in zip("AB", sides, pythons, strict=True):
            name = f"{letter} ({side.name})"
            if side.stage != TRAIN:
                raise UserError(f"{name}: a run of the stage {side.stage}; only trainings can be timed with --time")
            images = _IMAGES.search(side.functions.get("train_step", {}).get("signature", ""))
            if images is None:
                raise UserError(f"{name}: has no compile profile, so the shapes of its data are unknown")
            is_dirty = side.run.data.tags.get("git.dirty") == "true"
            code = check_out(name, side.commit, folder / letter, side.patch if is_dirty else "")
            write_params(code, side.run.data.params)
            examples, *shape = (int(size) for size in images.groups() if size)
            classes = int(side.timings["classes"])
            revisions.append(Revision(name, code, python, examples=examples, image_shape=shape, classes=classes))
        return time_revisions(*revisions, seconds=seconds, cache=folder / "cache")


def _seconds(before: RunDetails, after: RunDetails) -> Rows:
    """Return the seconds of each cause, and in total; empty if those of a run are unknown."""
    if not (before.seconds and after.seconds):
        return []
    causes = dict.fromkeys([*before.seconds, *after.seconds], 0.0)
    first, second = (causes | side.seconds | {"total": sum(side.seconds.values())} for side in (before, after))
    return _compared("cause", first, second, digits=2)


def _compared(title: str, before: Mapping[str, float], after: Mapping[str, float], digits: int = 9) -> Rows:
    """Return the numbers of both runs, and their difference if both have one."""
    rows = Rows()
    for key in dict.fromkeys([*before, *after]):
        first, second = before.get(key), after.get(key)
        difference = None if first is None or second is None else second - first
        values = {"A": first, "B": second, "B − A": difference}.items()
        rounded = {side: None if value is None else round(value, digits) + 0.0 for side, value in values}  # no −0
        rows.append({title: key} | rounded)
    return rows


def _headline(seconds: Rows, before: RunDetails, after: RunDetails) -> str:
    """Return the totals and their difference, the causes that differ most, and the numbers of cached functions."""
    *causes, total = seconds
    largest = sorted(causes, key=lambda row: -abs(row["B − A"]))[:_MOST_CAUSES]
    parts = ", ".join(f"{row['cause'].replace('_', ' ')} {duration(row['B − A'], '+')}" for row in largest)
    cached = ", then ".join(f"{side.num_cached} of {len(side.functions)}" for side in (before, after))
    times = f"{duration(total['A'])}, then {duration(total['B'])} ({duration(total['B − A'], '+')})"
    return f"{times}: {parts}; cached: {cached}"


def _attribution(tables: Mapping[str, Rows], before: RunDetails, after: RunDetails) -> str:
    """Return which of the seconds the differing params and data can explain, in a sentence."""
    if tables["code"] or tables["environment"]:
        return "Code or environment differ, which can explain any of these seconds."
    same_cache = before.num_cached == after.num_cached
    chance = "the load of the machine" if same_cache else "the compilation cache and the load of the machine"
    keys = [row["key"] for row in (*tables["params"], *tables["data"])]
    if not keys:
        return f"Params, data and code are the same: these seconds come from {chance}."
    names = ", ".join(keys) if len(keys) <= _MOST_KEYS else f"The {len(keys)} differences in params and data"
    parts = "the training loop" if before.stage == TRAIN else "the work"
    if same_cache and any(row["program"] != "same" for row in tables["functions"]):
        parts += " and compiling"
    return f"{names} can explain only {parts}; the other seconds come from {chance}."


def _functions(before: RunDetails, after: RunDetails) -> Rows:
    """Return the costs and times of each compiled function, and whether both runs have the same program."""
    table_rows = Rows()
    for name in dict.fromkeys([*before.functions, *after.functions]):
        rows = before.functions.get(name, {}), after.functions.get(name, {})
        steady = [1e3 * seconds if (seconds := _number(row, "steady_call_seconds")) else None for row in rows]
        table_rows.append(
            {"function": name, "program": _verdict(rows, (before.program(name), after.program(name)))}
            | {title: (_number(rows[0], key), _number(rows[1], key)) for key, title in _COSTS.items()}
            | {"cached": (rows[0].get("cached"), rows[1].get("cached")), "call, ms": (steady[0], steady[1])}
            | {"ratio": steady[1] / steady[0] if steady[0] and steady[1] else None}
        )
    return table_rows


def _verdict(rows: tuple[Mapping[str, Any], Mapping[str, Any]], programs: tuple[str, str]) -> str:
    if not all(rows):
        return "only in A" if rows[0] else "only in B"
    if not all(programs):
        return "not stored"
    return "same" if program_digest(programs[0]) == program_digest(programs[1]) else "other"


def program_digest(text: str) -> str:
    """Return a digest of optimized HLO that ignores the names and source lines of instructions."""
    header, _, body = text.partition("\n")
    code = "\n".join(_UNNAMED.sub("", line) for line in body.splitlines() if not _SOURCE_LINE.fullmatch(line))
    names: dict[str, str] = {}
    numbered = _NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"), code)
    return hashlib.sha256(f"{header.partition(',')[2]}\n{numbered}".encode()).hexdigest()


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a table; None if it is missing or NaN, which stands for unknown."""
    number = row.get(key)
    return None if number is None or math.isnan(number) else number


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> Rows:
    return [
        {"key": key, "A": before.get(key, _ABSENT), "B": after.get(key, _ABSENT)}
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def edits(patch: str) -> dict[str, str]:
    """Return the parts of a diff of git, by file."""
    parts = re.split(r"(?m)^(?=diff --git )", patch)
    return {match[1]: part for part in parts if (match := re.match(r"diff --git a/(\S+) b/", part))}


def _changed_code(before: RunDetails, after: RunDetails) -> list[str]:
    """Return the differing files of the stage's code, or the deps if git does not have the commits."""
    deps = [row["key"] for row in _differing(before.deps(code=True), after.deps(code=True))]
    if not deps:
        return []
    one, other = edits(before.patch), edits(after.patch)
    changed = {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}
    if before.commit and after.commit:
        try:
            changed |= {*git("diff", "--name-only", before.commit, after.commit, "--", *deps).splitlines()}
        except UserError:  # a commit that this repository lacks
            return sorted(deps)
    return sorted(path for path in changed if any(path == dep or path.startswith(f"{dep}/") for dep in deps)) or deps


def _cell(value: Any, *, is_time: bool = False) -> str:
    """Return a value as text with four digits; counts have three and a unit, such as `134 M`, times two."""
    if isinstance(value, tuple):
        return " → ".join(dict.fromkeys(map(_cell, value)))
    if value is None:
        return _ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if is_time:
        return duration(value)
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.4g}"
