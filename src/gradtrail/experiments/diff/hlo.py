"""Optimized HLO as XLA prints it: read into instructions that can be compared, whatever they are called or numbered."""

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
_OWN = re.compile(r".*?((?:src/gradtrail|pipeline)/.+)")
_SILENT = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy"}  # which compute nothing


@dataclass(frozen=True, order=True)
class Instruction:
    """An instruction, without its name.

    Attributes:
        opcode: such as `dot` or `fusion`.
        shape: of the result without its layout, such as `f32[128,10]`.
        function: of the project's Python that it comes from, such as `src/gradtrail/core/nn/losses.py, cross_entropy`,
            or nothing: an edit above it moves its lines.
        line: in that function, such as `src/gradtrail/core/nn/losses.py:42`; or nothing.
    """

    opcode: str
    shape: str
    function: str
    line: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program.

    Attributes:
        instructions: of all its computations, those inside of fusions too.
        digest: equal for programs that differ in names and source lines alone.
    """

    instructions: tuple[Instruction, ...]
    digest: str

    def float64_lines(self) -> Counter[str]:
        """Count the instructions with a float64 result by the line that they come from."""
        return Counter(each.line for each in self.instructions if re.search(r"\bf64\[", each.shape))


@dataclass(frozen=True)
class Change:
    """Instructions of an opcode from one function of Python, of which one program has more.

    Attributes:
        opcode: of the instructions.
        line: of one of them, in the program that has more; or nothing, where XLA made them.
        before: how many the first program has.
        after: how many the second one has.
        shapes: of their results, those that only one of the programs has, at most three.
    """

    opcode: str
    line: str
    before: int
    after: int
    shapes: tuple[str, ...]


def read_program(text: str) -> Program:
    """Read a program from the text that `jax.stages.Compiled.as_text` returns."""
    header, _, body = text.partition("\n")
    tables, rest = _tables(body)
    lines = _source_lines(tables)
    found, normalized, names = [], [header.partition(",")[2]], dict[str, str]()
    for line in rest:
        code = _METADATA.sub("", _COMMENT.sub("", line))
        normalized.append(_NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"), code))
        if match := _INSTRUCTION.match(code):
            frame = _FRAME.search(line)
            where = lines.get(int(frame[1]), ("", "")) if frame else ("", "")
            found.append(Instruction(match[2], _LAYOUT.sub("", match[1]), *where))
    digest = hashlib.sha256("\n".join(normalized).encode()).hexdigest()
    return Program(instructions=tuple(found), digest=digest)


def changes(before: Program, after: Program) -> list[Change]:
    """Return the opcodes of which one program has more, by function of Python; products and the most first.

    Instructions that only move data count where nothing else differs.
    """
    sides = (before, after)
    counts = [Counter(map(_place, program.instructions)) for program in sides]
    all_of = [Counter(program.instructions) for program in sides]
    only = [all_of[0] - all_of[1], all_of[1] - all_of[0]]
    found = []
    for key in counts[0].keys() | counts[1].keys():
        numbers = counts[0][key], counts[1][key]
        if numbers[0] != numbers[1]:
            of_key = [[each for each in kind if _place(each) == key] for kind in only]
            more = of_key[numbers[1] > numbers[0]]
            shapes = tuple(sorted({each.shape for kind in of_key for each in kind})[:3])
            found.append(Change(key[0], more[0].line if more else "", *numbers, shapes))
    telling = [each for each in found if each.opcode not in _SILENT] or found
    return sorted(telling, key=lambda one: (one.opcode != "dot", -abs(one.after - one.before), one.opcode, one.line))


def reshaped(before: Program, after: Program) -> list[tuple[str, str, int]]:
    """Return shape before, shape after and count of instructions that differ in the shape alone, the most first."""
    lost, gained = (
        Counter(one.instructions) - Counter(other.instructions) for one, other in ((before, after), (after, before))
    )
    pairs: Counter[tuple[str, str]] = Counter()
    for key in set(map(_place, lost)) & set(map(_place, gained)):
        shapes = (sorted(each.shape for each in kind.elements() if _place(each) == key) for kind in (lost, gained))
        pairs.update(zip(*shapes, strict=False))
    return [(*pair, count) for pair, count in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))]


def _place(instruction: Instruction) -> tuple[str, str]:
    """Return what instructions are counted by."""
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
    """Return stack frame → the innermost function and line of the project, its caller's where it is of a library."""
    places = {}
    for number, fields in tables["FileLocations"].items():
        of = {key: int(value) for key, value in _FIELD.findall(fields)}
        own = _OWN.fullmatch(tables["FileNames"].get(of.get("file_name_id", 0), ""))
        function = tables["FunctionNames"].get(of.get("function_name_id", 0), "")
        places[number] = (f"{own[1]}, {function}", f"{own[1]}:{of.get('line', 0)}") if own else None
    found: dict[int, tuple[str, str]] = {}
    for number, fields in sorted(tables["StackFrames"].items()):
        of = {key: int(value) for key, value in _FIELD.findall(fields)}
        caller = of.get("parent_frame_id", 0) - 1  # printed with 1 for none
        found[number] = places.get(of.get("file_location_id", 0)) or found.get(caller, ("", ""))
    return found
