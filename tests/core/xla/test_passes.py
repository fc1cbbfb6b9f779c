"""The batch size follows from the compiled function and a budget alone."""

import dataclasses

import pytest

from gradtrail.core.xla import passes
from gradtrail.core.xla.compiler import NO_COST, NO_TIMES, CompiledFunction


@pytest.mark.parametrize(
    ("budget", "at_least", "tried"), [(2**20, 1, [100]), (64, 1, [100, 16]), (1, 1, [100, 1]), (1, 7, [100, 7])]
)
def test_largest_size_within_the_budget_is_compiled(
    budget: int, at_least: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "TEMPORARY_BYTES", {"cpu": budget})
    sizes: list[int] = []

    def compile_at(size: int) -> CompiledFunction:
        sizes.append(size)
        cost = dataclasses.replace(NO_COST, temporary_bytes=4 * size)
        return CompiledFunction(name="f", call=print, cost=cost, times=NO_TIMES)

    assert passes.compile_within(100, compile_at, at_least=at_least).batch_size == tried[-1]
    assert sizes == tried
