"""Compares optimized HLO, as XLA prints it, without the names and numbers that XLA gives its instructions."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Instruction:
    """An instruction, without its name."""

    opcode: str  # opcode such as `dot` or `fusion`
    shape: str  # shape of the result without its layout, such as `f32[128,10]`
    function: str  # Python function of the project, such as `src/gradtrail/core/nn/losses.py, cross_entropy`
    line: str = field(compare=False)  # line in it, such as `src/gradtrail/core/nn/losses.py:42`; edits above move it


@dataclass(frozen=True)
class Program:
    """A program: the instructions of all computations, and a hash that ignores names and source lines."""

    instructions: tuple[Instruction, ...]
    digest: str


@dataclass(frozen=True)
class Change:
    """Instructions with one opcode from one Python function, whose counts differ between the programs."""

    opcode: str
    line: str  # source line of one of them, in the program that has more; empty if XLA made them
    gained: int  # count in the second program minus that in the first
    shapes: tuple[str, ...]  # at most three shapes of results that only one of the programs has


def read_program(text: str) -> Program:
    """Read a program from the text that `jax.stages.Compiled.as_text` returns."""
    header, _, body = text.partition("\n")
    tables, rest = _split_tables(body)
    lines = _source_lines(tables)
    instructions, normalized, names = [], [header.partition(",")[2]], dict[str, str]()
    for line in rest:
        code = _METADATA.sub("", _COMMENT.sub("", line))
        normalized.append(_NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"), code))
        if match := _INSTRUCTION.match(code):
            frame = _FRAME.search(line)
            place = lines.get(int(frame[1]), ("", "")) if frame else ("", "")
            instructions.append(Instruction(match[2], _LAYOUT.sub("", match[1]), *place))
    digest = hashlib.sha256("\n".join(normalized).encode()).hexdigest()
    return Program(tuple(instructions), digest)


def changes(before: Program, after: Program) -> list[Change]:
    """Return the opcodes whose counts differ, by Python function; products and the largest differences first.

    Instructions that only move data count if nothing else differs.
    """
    counts = Counter(after.instructions)
    counts.subtract(before.instructions)
    groups: dict[tuple[str, str], list[tuple[Instruction, int]]] = {}
    for instruction, count in counts.items():
        if count:
            groups.setdefault((instruction.opcode, instruction.function), []).append((instruction, count))
    result = []
    for (opcode, _), items in groups.items():
        # Instructions of another shape are lost and gained as often: their counts cancel
        if gained := sum(count for _, count in items):
            line = next(instruction.line for instruction, count in items if count * gained > 0)
            shapes = sorted({instruction.shape for instruction, _ in items})[:3]
            result.append(Change(opcode, line, gained, tuple(shapes)))
    working = [change for change in result if change.opcode not in _NO_WORK] or result
    return sorted(working, key=lambda one: (one.opcode != "dot", -abs(one.gained), one.opcode, one.line))


def _split_tables(body: str) -> tuple[dict[str, dict[int, Any]], list[str]]:
    """Split off the tables of source lines that precede the computations; an entry is a text or a dict of numbers."""
    tables: dict[str, dict[int, Any]] = {name: {} for name in _TABLES}
    rest, current = [], ""
    for line in body.splitlines():
        if line in tables:
            current = line
        elif current and (match := _ENTRY.fullmatch(line)):
            fields = {key: int(value) for key, value in _FIELD.findall(match[3] or "")}
            tables[current][int(match[1])] = fields if match[2] is None else match[2]
        elif line:
            current = ""
            rest.append(line)
    return tables, rest


def _source_lines(tables: Mapping[str, Mapping[int, Any]]) -> dict[int, tuple[str, str]]:
    """Return the innermost function and line of the project, by stack frame."""
    places = {}
    for number, fields in tables["FileLocations"].items():
        file = _PROJECT_FILE.fullmatch(tables["FileNames"].get(fields.get("file_name_id"), ""))
        function = tables["FunctionNames"].get(fields.get("function_name_id"), "")
        places[number] = (f"{file[1]}, {function}", f"{file[1]}:{fields.get('line', 0)}") if file else None
    result: dict[int, tuple[str, str]] = {}
    for number, fields in sorted(tables["StackFrames"].items()):
        caller = fields.get("parent_frame_id", 0) - 1  # printed with 1 for none
        result[number] = places.get(fields.get("file_location_id")) or result.get(caller, ("", ""))
    return result
