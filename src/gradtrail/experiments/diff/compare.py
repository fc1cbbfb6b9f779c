"""What differs between two runs: params, data, code, machine, versions, and each compiled function."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from gradtrail.experiments.diff.hlo import Change, Program, changes, reshaped
from gradtrail.experiments.diff.sides import Function, Side
from gradtrail.stages.common.pipeline_file import is_code
from gradtrail.support.errors import UserError
from gradtrail.support.git import git

SLOWER = 1.1  # ratio of steady times from which a function is called slower, or by its inverse faster
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
    """A function of both runs, or of one of them.

    Attributes:
        name: such as `train_step`.
        before: of the first run.
        after: of the second run.
        programs: the optimized programs, where both are stored.
        is_other_machine: whether the runs' machines differ.
    """

    name: str
    before: Function | None
    after: Function | None
    programs: tuple[Program, Program] | None
    is_other_machine: bool

    def numbers(self, key: str) -> tuple[float | None, float | None]:
        """Return a cost or a time in both runs."""
        first, second = (one.numbers.get(key) if one else None for one in (self.before, self.after))
        return first, second

    def ratio(self, key: str) -> float | None:
        """Return the second number over the first; None where one is unknown or the first is 0."""
        first, second = self.numbers(key)
        return second / first if first and second is not None else None

    @property
    def is_same_program(self) -> bool | None:
        """Whether the optimized programs are the same but for names and lines; None where one is not stored."""
        return self.programs[0].digest == self.programs[1].digest if self.programs else None

    @property
    def verdict(self) -> Verdict:
        """What became of it, in words."""
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
        """The opcodes of which one program has more; empty for the same program."""
        return changes(*self.programs) if self.programs and not self.is_same_program else []

    @cached_property
    def reshaped(self) -> list[tuple[str, str, int]]:
        """Shape before, shape after and count of instructions that differ in the shape alone."""
        return reshaped(*self.programs) if self.programs and not self.is_same_program else []

    def float64_lines(self) -> list[str]:
        """Return the lines of Python with float64 in the second program, where the first has none."""
        if not self.programs or self.programs[0].float64_lines():
            return []
        return [line for line, _ in self.programs[1].float64_lines().most_common()]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of one stage, side by side.

    Attributes:
        params: key → values, of params that differ.
        data: dep or out → digests, of data that differs.
        code: files or, without git's history, folders that differ.
        environment: what differs of machine, system, versions and switches.
        functions: in the order in which they were compiled.
    """

    before: Side
    after: Side
    params: Mapping[str, Pair]
    data: Mapping[str, Pair]
    code: list[str]
    environment: Mapping[str, Pair]
    functions: list[FunctionPair]

    @property
    def is_same_state(self) -> bool:
        """Whether both are of one state."""
        return bool(self.before.run.data.tags["state"] == self.after.run.data.tags["state"])

    def seconds(self, part: str) -> float:
        """Return by how much longer the second run took for a part; 0 where that is unknown."""
        if not (self.before.seconds and self.after.seconds):
            return 0.0
        return self.after.seconds[part] - self.before.seconds[part]

    @property
    def totals(self) -> tuple[float, float] | None:
        """Seconds of both runs; None where they are unknown."""
        if not (self.before.seconds and self.after.seconds):
            return None
        return sum(self.before.seconds.values()), sum(self.after.seconds.values())


def compare(before: Side, after: Side) -> Comparison:
    """Compare two runs; raise UserError in one line if they are of different stages."""
    if before.stage != after.stage:
        raise UserError(
            f"{before.label} is a run of the stage {before.stage}, {after.label} of {after.stage}: "
            f"two runs of one stage can be compared; `--stage {before.stage}` takes that of both trainings"
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


def _pair(name: str, before: Side, after: Side, *, is_other_machine: bool) -> FunctionPair:
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
    found = dict[str, str]()
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": str(value)}
    return found


def _deps(side: Side, *, code: bool) -> dict[str, str]:
    """Return dep → digest of the stage that was run, of code or of data."""
    deps: dict[str, str] = side.lineage.get(side.stage, {}).get("deps", {})
    return {path: found for path, found in deps.items() if is_code(path) == code}


def _edits(diff: str) -> dict[str, str]:
    """Return file → its part of a diff of git."""
    parts = re.split(r"(?m)^(?=diff --git )", diff)
    return {found[1]: part for part in parts if (found := _FILE.match(part))}


def _changed_code(before: Side, after: Side) -> list[str]:
    """Return the files of the stage's code that differ, by git; the folders where git does not know the commits."""
    folders = _differing(*(_deps(side, code=True) for side in (before, after)))
    if not folders:
        return []
    one, other = _edits(before.diff), _edits(after.diff)
    edited = {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}
    committed: set[str] = set()
    if before.commit and after.commit:
        try:
            committed = {*git("diff", "--name-only", before.commit, after.commit, "--", *folders).splitlines()}
        except UserError:  # a commit that this repository lacks
            return sorted(folders)
    files = {path for path in edited | committed if any(path == dep or path.startswith(f"{dep}/") for dep in folders)}
    return sorted(files) or sorted(folders)
