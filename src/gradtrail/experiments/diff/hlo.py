"""Reads optimized HLO, as XLA prints it, into instructions that are compared without their names and numbers."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.-]+ = ((?:\([^=]*?\)|\S+)) ([a-z][\w-]*)\(")
_LAYOUT = re.compile(r"\{[\d,:TS()*]*\}")
_COMMENT = re.compile(r"/\*.*?\*/")
_METADATA = re.compile(r", metadata=\{(?:[^{}\"]|\"[^\"]*\")*\}|, backend_config=\{.*\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_NAME = re.compile(r"%[\w.-]+")
_ENTRY = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})")
_FIELD = re.compile(r"(\w+)=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_PROJECT_FILE = re.compile(r".*?((?:src/gradtrail|pipeline)/.+)")
_NO_WORK = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy"}  # opcodes that compute nothing


@dataclass(frozen=True, order=True)
class Instruction:
    """An instruction, without its name."""

    opcode: str  # opcode such as `dot` or `fusion`
    shape: str  # shape of the result without its layout, such as `f32[128,10]`
    function: (
        str  # Python function of the project, such as `src/gradtrail/core/nn/losses.py, cross_entropy`; may be empty
    )
    line: str = field(compare=False)  # line in it, such as `src/gradtrail/core/nn/losses.py:42`; edits above move it


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program."""

    instructions: tuple[Instruction, ...]  # instructions of all computations, including those inside of fusions
    digest: str  # hash that ignores names and source lines

    def float64_lines(self) -> Counter[str]:
        """Count the instructions with a float64 result by source line."""
        return Counter(item.line for item in self.instructions if re.search(r"\bf64\[", item.shape))


@dataclass(frozen=True)
class Change:
    """Instructions with one opcode from one Python function, whose counts differ between the programs."""

    opcode: str
    line: str  # source line of one of them, in the program that has more; empty if XLA made them
    before: int  # count in the first program
    after: int  # count in the second program
    shapes: tuple[str, ...]  # at most three shapes of results that only one of the programs has


def read_program(text: str) -> Program:
    """Read a program from the text that `jax.stages.Compiled.as_text` returns."""
    header, _, body = text.partition("\n")
    tables, rest = _tables(body)
    lines = _source_lines(tables)
    instructions, normalized, names = [], [header.partition(",")[2]], dict[str, str]()
    for line in rest:
        code = _METADATA.sub("", _COMMENT.sub("", line))
        normalized.append(_NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"), code))
        if match := _INSTRUCTION.match(code):
            frame = _FRAME.search(line)
            where = lines.get(int(frame[1]), ("", "")) if frame else ("", "")
            instructions.append(Instruction(match[2], _LAYOUT.sub("", match[1]), *where))
    digest = hashlib.sha256("\n".join(normalized).encode()).hexdigest()
    return Program(instructions=tuple(instructions), digest=digest)


def changes(before: Program, after: Program) -> list[Change]:
    """Return the opcodes whose counts differ, by Python function; products and the largest differences first.

    Instructions that only move data count if nothing else differs.
    """
    sides = (before, after)
    counts = [Counter(map(_place, program.instructions)) for program in sides]
    instructions = [Counter(program.instructions) for program in sides]
    only = [instructions[0] - instructions[1], instructions[1] - instructions[0]]
    result = []
    for key in counts[0].keys() | counts[1].keys():
        numbers = counts[0][key], counts[1][key]
        if numbers[0] != numbers[1]:
            with_key = [[item for item in side if _place(item) == key] for side in only]
            more = with_key[numbers[1] > numbers[0]]
            shapes = tuple(sorted({item.shape for side in with_key for item in side})[:3])
            result.append(Change(key[0], more[0].line if more else "", *numbers, shapes))
    working = [change for change in result if change.opcode not in _NO_WORK] or result
    return sorted(
        working,
        key=lambda change: (change.opcode != "dot", -abs(change.after - change.before), change.opcode, change.line),
    )


def reshaped(before: Program, after: Program) -> list[tuple[str, str, int]]:
    """Return shape before, shape after and count of instructions that differ only in their shape, the most first."""
    lost, gained = (
        Counter(one.instructions) - Counter(other.instructions) for one, other in ((before, after), (after, before))
    )
    pairs: Counter[tuple[str, str]] = Counter()
    for key in set(map(_place, lost)) & set(map(_place, gained)):
        shapes = (sorted(item.shape for item in side.elements() if _place(item) == key) for side in (lost, gained))
        pairs.update(zip(*shapes, strict=False))
    return [(*pair, count) for pair, count in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))]


def _place(instruction: Instruction) -> tuple[str, str]:
    """Return the key by which instructions are counted."""
    return instruction.opcode, instruction.function


def _tables(body: str) -> tuple[dict[str, dict[int, str]], list[str]]:
    """Split off the tables of source lines that precede the computations."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    rest, current = [], ""
    for line in body.splitlines():
        if line in tables:
            current = line
        elif current and (match := _ENTRY.fullmatch(line)):
            tables[current][int(match[1])] = match[2] if match[2] is not None else match[3]
        elif line:
            current = ""
            rest.append(line)
    return tables, rest


def _source_lines(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[str, str]]:
    """Return the innermost function and line of the project, by stack frame."""
    places = {}
    for number, fields in tables["FileLocations"].items():
        ids = {key: int(value) for key, value in _FIELD.findall(fields)}
        file = _PROJECT_FILE.fullmatch(tables["FileNames"].get(ids.get("file_name_id", 0), ""))
        function = tables["FunctionNames"].get(ids.get("function_name_id", 0), "")
        places[number] = (f"{file[1]}, {function}", f"{file[1]}:{ids.get('line', 0)}") if file else None
    result: dict[int, tuple[str, str]] = {}
    for number, fields in sorted(tables["StackFrames"].items()):
        ids = {key: int(value) for key, value in _FIELD.findall(fields)}
        caller = ids.get("parent_frame_id", 0) - 1  # printed with 1 for none
        result[number] = places.get(ids.get("file_location_id", 0)) or result.get(caller, ("", ""))
    return result
