"""What differs between two runs: params, data, code, machine, versions, and each compiled function."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from gradtrail.experiments.diff.hlo import Change, Program, changes, reshaped
from gradtrail.experiments.diff.sides import Function, RunDetails
from gradtrail.stages.common.pipeline_file import is_code
from gradtrail.support.errors import UserError
from gradtrail.support.git import git

SLOWER = 1.1  # smallest ratio of steady times at which a function counts as slower, or by its inverse as faster
Pair = tuple[str, str]  # a value of the first run and of the second
Verdict = Literal[
    "same program",
    "same program, slower",
    "same program, faster",
    "same program, slower machine",
    "same program, faster machine",
    "other program",
    "only in the first",
    "only in the second",
    "program not stored",
]
_FILE = re.compile(r"diff --git a/(\S+) b/")
_ABSENT = "–"


@dataclass(frozen=True)
class FunctionPair:
    """A function of both runs, or of one of them."""

    name: str  # name such as `train_step`
    before: Function | None  # function of the first run
    after: Function | None  # function of the second run
    programs: tuple[Program, Program] | None  # optimized programs, if both are stored
    is_other_machine: bool  # True if the runs' machines differ

    def numbers(self, key: str) -> tuple[float | None, float | None]:
        """Return a cost or a time in both runs."""
        first, second = (function.numbers.get(key) if function else None for function in (self.before, self.after))
        return first, second

    def ratio(self, key: str) -> float | None:
        """Return the second number over the first; None if one is unknown or the first is 0."""
        first, second = self.numbers(key)
        return second / first if first and second is not None else None

    @property
    def is_same_program(self) -> bool | None:
        """Whether the optimized programs are equal except for names and lines; None if one is not stored."""
        return self.programs[0].digest == self.programs[1].digest if self.programs else None

    @property
    def verdict(self) -> Verdict:
        """The result of the comparison, in words."""
        if not (self.before and self.after):
            return "only in the first" if self.before else "only in the second"
        if not self.is_same_program:
            return "other program" if self.programs else "program not stored"
        ratio = self.ratio("steady_call_seconds")
        if ratio is None or 1 / SLOWER < ratio < SLOWER:
            return "same program"
        if ratio > 1:
            return "same program, slower machine" if self.is_other_machine else "same program, slower"
        return "same program, faster machine" if self.is_other_machine else "same program, faster"

    @cached_property
    def changes(self) -> list[Change]:
        """The opcodes whose counts differ; empty for the same program."""
        return changes(*self.programs) if self.programs and not self.is_same_program else []

    @cached_property
    def reshaped(self) -> list[tuple[str, str, int]]:
        """Shape before, shape after and count of instructions that differ only in their shape."""
        return reshaped(*self.programs) if self.programs and not self.is_same_program else []

    def float64_lines(self) -> list[str]:
        """Return the lines of Python with float64 in the second program; none if the first has float64 too."""
        if not self.programs or self.programs[0].float64_lines():
            return []
        return [line for line, _ in self.programs[1].float64_lines().most_common()]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of one stage, and their differences."""

    before: RunDetails
    after: RunDetails
    params: Mapping[str, Pair]  # differing params, key → values
    data: Mapping[str, Pair]  # differing data, path → digests
    code: list[str]  # differing files or, without git's history, folders
    environment: Mapping[str, Pair]  # differing facts about machine, system, versions and switches
    functions: list[FunctionPair]  # functions in the order of compilation

    @property
    def is_same_state(self) -> bool:
        """Whether both runs have the same state."""
        return bool(self.before.run.data.tags["state"] == self.after.run.data.tags["state"])

    def seconds(self, part: str) -> float:
        """Return the additional seconds of the second run for a part; 0 if they are unknown."""
        if not (self.before.seconds and self.after.seconds):
            return 0.0
        return self.after.seconds[part] - self.before.seconds[part]

    @property
    def totals(self) -> tuple[float, float] | None:
        """Seconds of both runs; None if they are unknown."""
        if not (self.before.seconds and self.after.seconds):
            return None
        return sum(self.before.seconds.values()), sum(self.after.seconds.values())


def compare(before: RunDetails, after: RunDetails) -> Comparison:
    """Compare two runs; raise UserError in one line if they are of different stages."""
    if before.stage != after.stage:
        raise UserError(
            f"{before.label} is a run of the stage {before.stage}, {after.label} of {after.stage}: "
            f"only runs of one stage can be compared; `--stage {before.stage}` chooses that stage of both trainings"
        )
    environment = _differing(_flat(before.environment), _flat(after.environment))
    other_machine = before.run.data.tags.get("machine") != after.run.data.tags.get("machine")
    names = list(dict.fromkeys([*before.functions, *after.functions]))
    return Comparison(
        before=before,
        after=after,
        params=_differing(before.run.data.params, after.run.data.params),
        data=_differing(*(_deps(side, code=False) for side in (before, after))),
        code=_changed_code(before, after),
        environment=environment if before.environment and after.environment else {},
        functions=[_pair(name, before, after, is_other_machine=other_machine) for name in names],
    )


def _pair(name: str, before: RunDetails, after: RunDetails, *, is_other_machine: bool) -> FunctionPair:
    functions = before.functions.get(name), after.functions.get(name)
    programs = None
    if all(functions):
        first, second = before.program(name), after.program(name)
        programs = (first, second) if first and second else None
    return FunctionPair(name, *functions, programs, is_other_machine)


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Pair]:
    keys = dict.fromkeys([*before, *after])
    pairs = {key: (before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat = dict[str, str]()
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
    return flat


def _deps(side: RunDetails, *, code: bool) -> dict[str, str]:
    """Return the deps of the stage that are code, or those that are data, path → digest."""
    deps: dict[str, str] = side.lineage.get(side.stage, {}).get("deps", {})
    return {path: md5 for path, md5 in deps.items() if is_code(path) == code}


def _edits(diff: str) -> dict[str, str]:
    """Return the parts of a diff of git, by file."""
    parts = re.split(r"(?m)^(?=diff --git )", diff)
    return {match[1]: part for part in parts if (match := _FILE.match(part))}


def _changed_code(before: RunDetails, after: RunDetails) -> list[str]:
    """Return the differing files of the stage's code, or the folders if git does not have the commits."""
    folders = _differing(*(_deps(side, code=True) for side in (before, after)))
    if not folders:
        return []
    edits = _edits(before.diff), _edits(after.diff)
    edited = {path for path in edits[0].keys() | edits[1].keys() if edits[0].get(path) != edits[1].get(path)}
    committed: set[str] = set()
    if before.commit and after.commit:
        try:
            committed = {*git("diff", "--name-only", before.commit, after.commit, "--", *folders).splitlines()}
        except UserError:  # a commit that this repository lacks
            return sorted(folders)
    files = {path for path in edited | committed if any(path == dep or path.startswith(f"{dep}/") for dep in folders)}
    return sorted(files) or sorted(folders)
