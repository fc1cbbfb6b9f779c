"""The sentence on top names what made a run slower, and nothing for two runs that differ by chance."""

from types import SimpleNamespace
from typing import Any

import pytest

from gradtrail.experiments.diff.cause import most_likely_cause
from gradtrail.experiments.diff.compare import Comparison, FunctionPair, _edits
from gradtrail.experiments.diff.hlo import Instruction, Program
from gradtrail.experiments.diff.sides import Function

LOSSES = "src/gradtrail/core/nn/losses.py"
DOT = Instruction("dot", "f32[8,8]", f"{LOSSES}, cross_entropy", f"{LOSSES}:24")
WIDE = Instruction("add", "f64[8]", f"{LOSSES}, cross_entropy", f"{LOSSES}:30")
SECONDS = {"imports": 2.0, "data": 0.1, "compile": 0.4, "compute": 3.4, "tracking": 0.1}
NUMBERS = {"flops": 100.0, "steady_call_seconds": 0.001, "donated_buffers": 33.0}


def comparison(
    *,
    seconds: dict[str, float] | None = None,
    numbers: dict[str, float] | None = None,
    gained: Instruction | None = None,
    cached: tuple[bool, bool] = (True, True),
    **differing: Any,
) -> Comparison:
    """Return two runs of which the second differs in what is given."""
    sides = [
        SimpleNamespace(
            name=name, seconds=SECONDS | extra, run=SimpleNamespace(data=SimpleNamespace(tags={"state": "s"}))
        )
        for name, extra in (("A", {}), ("B", seconds or {}))
    ]
    functions = [
        Function("train_step", NUMBERS | extra, is_cached, "")
        for extra, is_cached in zip(({}, numbers or {}), cached, strict=True)
    ]
    instructions = (DOT,), (DOT, *([gained] if gained else []))
    is_other = bool(gained or (numbers and ("flops" in numbers or "donated_buffers" in numbers)))
    first, second = (
        Program(instructions=instructions_of_run, digest=str(bool(number and is_other)))
        for number, instructions_of_run in enumerate(instructions)
    )
    machines = "machine" in differing.get("environment", {})
    pair = FunctionPair("train_step", *functions, (first, second), machines)
    none: Any = {"params": {}, "data": {}, "code": [], "environment": {}}
    return Comparison(before=sides[0], after=sides[1], functions=[pair], **none | differing)  # type: ignore[arg-type]


SLOWER = {"compute": 6.0}
EDITED = {"code": [LOSSES]}
PLANTED = {
    "a larger batch": (
        {"params": {"train.batch_size": ("128", "256")}, "numbers": {"flops": 200.0}, "seconds": SLOWER},
        "train.batch_size 128 → 256 (train_step: 2.00 × the FLOPs)",
    ),
    "a layer": (
        {"params": {"train.mlp.hidden": ("[8]", "[8, 8]")}, "gained": DOT, "seconds": SLOWER},
        "train.mlp.hidden [8] → [8, 8]",
    ),
    "a matmul in the loss": (
        {"gained": DOT, "seconds": SLOWER} | EDITED,
        f"the code changed ({LOSSES}): train_step has 1 × `dot` more, from {LOSSES}:24",
    ),
    "a lost donation": (
        {"numbers": {"donated_buffers": 9.0}} | EDITED,
        "train_step no longer reuses the memory of 24 donated arguments (33, then 9)",
    ),
    "float64": ({"gained": WIDE} | EDITED, f"float64 in train_step, unlike the first run, from {LOSSES}:30"),
    "a flag": (
        {"params": {"environment.xla_flags": ("[]", "['--xla_fast']")}, "seconds": SLOWER},
        "XLA's flags changed from [] to ['--xla_fast']; the optimized HLO is the same",
    ),
    "one core": (
        {"environment": {"processor.cores_allowed": ("2", "1")}, "seconds": SLOWER},
        "1 core in place of 2",
    ),
    "a container's limit": (
        {"environment": {"processor.cores_quota": ("2.0", "1.0")}, "seconds": SLOWER},
        "1.0 cores in place of 2.0 by the limit of a container",
    ),
    "a param and an edit": (
        {"params": {"train.epochs": ("5", "10")}, "gained": DOT, "seconds": SLOWER} | EDITED,
        f"train.epochs 5 → 10; the code changed too ({LOSSES}): train_step has 1 × `dot` more, from {LOSSES}:24",
    ),
    "a cold cache": (
        {"cached": (True, False), "seconds": {"compile": 4.0}},
        "a cold compilation cache: train_step had to be compiled, which made 3.6 s of the difference",
    ),
    "another machine": (
        {"environment": {"machine": ("AMD", "Intel")}, "seconds": SLOWER},
        "another kind of machine: AMD, then Intel",
    ),
    "other versions": (
        {"environment": {"packages.jax": ("0.10.2", "0.11.0")}, "gained": DOT},
        "other versions (packages.jax 0.10.2 → 0.11.0) made another program of train_step",
    ),
    "longer training": (
        {"params": {"train.epochs": ("3", "9")}, "seconds": SLOWER},
        "train.epochs 3 → 9, with the same programs",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_cause_is_named(name: str) -> None:
    planted, words = PLANTED[name]
    assert words in most_likely_cause(comparison(**planted))


@pytest.mark.parametrize(
    "differing",
    [
        {},
        {"seconds": {"compute": 3.5}},
        {"seconds": {"compute": 9.0}},
        {"params": {"train.seed": ("0", "1")}},
        {"cached": (True, False)},  # which costs nothing
        {"environment": {"processor.cores_allowed": ("2", "1")}},  # likewise
    ],
)
def test_no_cause_is_named_without_a_relevant_difference(differing: dict[str, Any]) -> None:
    assert "No cause: no recorded " in most_likely_cause(comparison(**differing))


def test_same_uncommitted_edit_of_both_runs_is_no_difference() -> None:
    both = "diff --git a/one.py b/one.py\n+ 1\n"
    before, after = _edits(both), _edits(both + "diff --git a/two.py b/two.py\n+ 2\n")
    assert before["one.py"] == after["one.py"]
    assert after.keys() - before.keys() == {"two.py"}


def test_seed_is_no_cause_if_another_param_differs() -> None:
    params = {"train.seed": ("0", "1"), "train.batch_size": ("128", "256")}
    assert "train.seed" not in most_likely_cause(comparison(params=params, gained=DOT))
