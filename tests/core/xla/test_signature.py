"""A function that is compiled again says which argument differs, in the sentences of the docs."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import run_on_devices

from gradtrail.core.xla.compile_log import CompileLog
from gradtrail.core.xla.signature import Signatures

PAGE = (Path(__file__).parents[3] / "docs" / "compiling.md").read_text(encoding="utf-8")
VALUES = np.ones(3, np.float32)
AS_BEFORE = "its arguments are as before: the function was made anew or closes over other values, or a setting differs"


def total(values: Any, scale: Any = 1.0, power: int = 1) -> Any:
    return jnp.asarray(scale).astype(values.dtype) * values**power


def printed(*calls: tuple[Any, ...]) -> str:
    """Call a new jitted function with the arguments of each call in turn; return what the last compilation says."""
    jitted = jax.jit(functools.partial(total), static_argnames="power")
    lines: list[str] = []
    with CompileLog(lambda compilation: lines.append(str(compilation))):
        for call in calls:
            jitted(*call)
    assert len(lines) == len(calls)
    return re.sub(r"at \S+:\d+", "at FILE:LINE", lines[-1])


PLANTED = {
    "shape": [(VALUES,), (np.ones(4, np.float32),)],
    "dtype": [(VALUES,), (VALUES.astype(np.int32),)],
    "static value": [(VALUES, 1.0, 2), (VALUES, 1.0, 3)],
    "weak type": [(VALUES, np.float32(2)), (VALUES, 2.0)],
}
ON_TWO_DEVICES = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax, test_signature as test
print(test.printed(*((jax.device_put(test.VALUES, device),) for device in jax.devices())))
"""


@pytest.mark.parametrize("kind", [*PLANTED, "device"])
def test_each_kind_of_difference_has_the_sentence_of_the_docs(kind: str) -> None:
    line = printed(*PLANTED[kind]) if kind in PLANTED else run_on_devices(ON_TWO_DEVICES, 2).strip()
    assert re.search(rf"argument \d \(`\w+`\) has {kind} .+, was .+", line)
    assert (f"\ntrain: warning: {line}\n" if kind == "shape" else f"\n{line.partition('LINE: ')[2]}\n") in PAGE


def test_nearest_program_is_the_one_with_fewest_differences() -> None:
    wide, narrow, short = np.ones((4, 8), np.int32), np.ones((4, 4), np.float32), np.ones((3, 4), np.float32)
    assert printed((wide,), (narrow,), (wide, 2.0), (short,)).endswith("(`values`) has shape (3, 4), was (4, 4)")


def test_arrays_in_containers_have_their_paths_and_static_values_of_any_length_are_cut() -> None:
    signatures, key = Signatures(), jax.eval_shape(lambda: jax.random.key(0))

    def step(state: Any, *rows: Any, **options: Any) -> None: ...

    def add(*args: Any, static: tuple[str | int, ...] = (), **kwargs: Any) -> str:
        return signatures.add(step, args, kwargs, static)[1]

    assert add({"a": VALUES, "b": (VALUES, key)}, VALUES, k=1) == ""
    assert add({"a": VALUES, "b": (VALUES, key)}, VALUES, k=1) == AS_BEFORE
    assert add({"a": VALUES, "b": (VALUES.astype(np.int8), key)}, VALUES, k=1) == (
        "argument 1 (`state['b'][0]`) has dtype int8, was float32"
    )
    assert add({"a": VALUES, "b": (VALUES, key)}, k=1) == "argument 2 (`rows[0]`) is left out, was given"
    assert add(dict.fromkeys("abcdefg", VALUES), k=1).endswith("; 5 more")
    add({}, static=("state",))
    assert len(add({"a": "x" * 1000}, static=("state",))) < 150


def test_static_values_are_compared_as_jax_does_and_may_be_among_further_arguments() -> None:
    class Width:
        """Without a `repr` of its own."""

        __eq__ = lambda self, other: True  # noqa: E731
        __hash__ = lambda self: 0  # noqa: E731

    lines: list[str] = []
    jitted = jax.jit(lambda values, *rest: values * rest[1], static_argnums=(1, 2))
    with CompileLog(lambda compilation: lines.append(compilation.reason)):
        for values, power in ((VALUES, 2), (VALUES, 3), (VALUES, 3.0), (VALUES.astype(np.int8), 3)):
            jitted(values, Width(), power)
    assert lines == [
        "",
        "argument 2 (`rest[1]`) has static value 3, was 2",
        "argument 2 (`rest[1]`) has static value 3.0, was 3",
        "argument 1 (`values`) has dtype int8, was float32",
    ]


def test_function_made_again_or_a_setting_of_jax_is_what_is_left() -> None:
    lines: list[str] = []
    with CompileLog(lambda compilation: lines.append(compilation.reason)):
        for scale in (2.0, 3.0):
            jax.jit(lambda values: scale * values)(VALUES)  # noqa: B023 - called here
        jitted = jax.jit(lambda values: values @ values)
        for precision in ("float32", "bfloat16"):
            with jax.default_matmul_precision(precision):
                jitted(VALUES)
        jax.lax.slice(jnp.asarray(VALUES), (0,), (1,))
    assert [reason for reason in lines if reason] == [AS_BEFORE] * 2


def test_without_the_frame_of_jax_function_and_line_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a version of JAX that calls it otherwise, and for a program that is compiled apart from a call."""
    with CompileLog() as log:
        jax.jit(total).lower(VALUES).compile()
    (compilation,) = log.unplanned
    assert re.fullmatch(r"jit\(total\) was compiled by a call at \S+test_signature.py:\d+", str(compilation))
