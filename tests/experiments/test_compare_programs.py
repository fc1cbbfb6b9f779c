"""Programs are told apart by what they compute, not by how XLA calls or numbers it; changes name a line of Python."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st
from jax import Array

from gradtrail.experiments.compare_programs import changes, read_program

MATRIX = jnp.ones((16, 16))


def text(function: Callable[[Array], Array], *, size: int = 16) -> str:
    """Return the optimized HLO of a function, as if this file were one of the project's."""
    compiled = jax.jit(function).lower(jnp.ones((size, 16))).compile()
    return str(compiled.as_text()).replace(str(Path(__file__).parent), "/home/somebody/src/gradtrail/core")


def once(inputs: Array) -> Array:
    return jnp.tanh(inputs @ MATRIX)


def twice(inputs: Array) -> Array:
    return jnp.tanh(inputs @ MATRIX @ (MATRIX + inputs.sum()))


TEXT = text(once)


def test_instructions_are_read_with_their_lines() -> None:
    program = read_program(TEXT)
    assert len(program.instructions) == sum(" = " in line for line in TEXT.splitlines()[1:])
    (product,) = [item for item in program.instructions if item.opcode == "dot"]
    assert product.shape == "f32[16,16]"
    assert product.function.endswith(", once")
    line = int(product.line.rpartition(":")[2])
    assert "inputs @ MATRIX" in Path(__file__).read_text().splitlines()[line - 1]


@given(shift=st.integers(0, 10**6), lines=st.integers(1, 500))
def test_digest_ignores_numbers_and_line_numbers(shift: int, lines: int) -> None:
    renamed = re.sub(r"%([\w-]+)\.(\d+)", lambda name: f"%{name[1]}.{int(name[2]) + shift}", TEXT)
    moved = re.sub(r"\bline=(\d+)", lambda line: f"line={int(line[1]) + lines}", renamed)
    before, after = read_program(TEXT), read_program(moved)
    assert before.digest == after.digest
    assert changes(before, after) == []


def test_additional_product_is_reported_with_its_line() -> None:
    first, *_ = changes(read_program(TEXT), read_program(text(twice)))
    assert (first.opcode, first.gained) in {("dot", 1), ("dot", 2)}  # the one of `once` is lost
    assert "/test_hlo.py:" in first.line


def test_different_shapes_are_no_gained_or_lost_instructions() -> None:
    before, after = read_program(TEXT), read_program(text(once, size=32))
    assert before.digest != after.digest
    assert [change for change in changes(before, after) if change.opcode == "dot"] == []
