"""Holds static costs against accepted ones: what changed beyond a tolerance."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gradtrail.core.compilation import Compiler

Costs = Mapping[str, Mapping[str, int]]  # function → figure → value

TOLERANCES = {
    "flops": 0.01,
    "transcendentals": 0.01,
    "bytes_accessed": 0.02,
    "total_bytes": 0.01,
    "hlo_instructions": 0.05,
    "jaxpr_equations": 0.0,
    "argument_bytes": 0.0,
    "output_bytes": 0.0,
    "donated_buffers": 0.0,
    "float64_instructions": 0.0,
    "compilations": 0.0,
}
"""By figure, the share of the accepted value by which it may differ, either way."""

OF_VERSION = frozenset(
    {"jaxpr_equations", "argument_bytes", "output_bytes", "donated_buffers", "float64_instructions", "compilations"}
)
"""What the same versions of jax and jaxlib must find on any processor."""

OF_PROGRAM = frozenset({"argument_bytes", "output_bytes", "float64_instructions"})
"""What any version must find on any processor."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure that is not what was accepted; None where the function is new, or gone."""

    function: str
    figure: str
    before: int | None
    after: int | None

    @property
    def ratio(self) -> float:
        """After by before; NaN where there is none."""
        return self.after / self.before if self.before and self.after is not None else float("nan")


def costs_of(compiler: Compiler) -> dict[str, dict[str, int]]:
    """Return the figures that are compared, of each function that was compiled."""
    return {
        name: {
            figure: compiler.compilations[name] if figure == "compilations" else getattr(function.cost, figure)
            for figure in TOLERANCES
        }
        for name, function in compiler.functions.items()
    }


def find_changes(accepted: Costs, found: Costs, figures: Collection[str]) -> list[Change]:
    """Return every figure of every function that differs by more than its tolerance, in the order of the functions."""
    return [
        Change(function=function, figure=figure, before=before, after=after)
        for function in dict.fromkeys([*accepted, *found])
        for figure in TOLERANCES
        if figure in figures
        and _differ(
            figure,
            before := accepted.get(function, {}).get(figure),
            after := found.get(function, {}).get(figure),
        )
    ]


def _differ(figure: str, before: int | None, after: int | None) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > TOLERANCES[figure] * abs(before)
