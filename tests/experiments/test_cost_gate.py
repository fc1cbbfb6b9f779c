"""`gradtrail gate`: planted regressions are found, costs within the tolerance are not, and `--accept` accepts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import ROOT, new_compiler, train_config
from projects import Project, copy_project

from gradtrail.core.nn import losses
from gradtrail.core.nn.layers import Dense
from gradtrail.core.nn.models import Model
from gradtrail.core.train.loop import TrainingFunctions
from gradtrail.core.xla.compiler import Compiler
from gradtrail.experiments import cost_gate
from gradtrail.experiments.cost_gate import ACCEPTED, TOLERANCES, costs_of, find_changes
from gradtrail.support.errors import UserError

COST = dict.fromkeys(TOLERANCES, 100)
MACHINE = {"jax": "1", "jaxlib": "1", "platform": "cpu", "architecture": "x"}


def costs() -> dict[str, dict[str, int]]:
    """Return the costs of the optimizer steps of a training."""
    config, compiler = train_config(model="linear"), new_compiler()
    TrainingFunctions(config, Model(config.model_config((3, 4), 3)), 10, jax.devices()).compile_run_steps(compiler)
    return costs_of(compiler)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # the planted float64
def test_planted_regressions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once, each by a metric that no other changes: a lost donation, a doubled product, a float64."""
    accepted = costs()
    compile_it, call, entropy = Compiler.compile, Dense.__call__, losses.cross_entropy

    def without(self: Compiler, *args: object, donate_argnums: object = (), **options: object) -> object:
        return compile_it(self, *args, **options)

    def twice(self: Dense, inputs: jax.Array) -> jax.Array:
        return call(self, inputs) + 1e-9 * call(self, jnp.sin(inputs))

    def leaking(logits: jax.Array, *args: object, **options: object) -> jax.Array:
        return entropy(logits * np.float64(1.0), *args, **options).astype(jnp.float32)

    monkeypatch.setattr(Compiler, "compile", without)
    monkeypatch.setattr(Dense, "__call__", twice)
    monkeypatch.setattr(losses, "cross_entropy", leaking)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        changes = find_changes(accepted, costs(), TOLERANCES)
    assert {"donated_buffers", "flops", "float64_instructions"} <= {row["metric"] for row in changes}


@pytest.mark.parametrize(("after", "is_change"), [(100, False), (101, False), (99, False), (102, True), (98, True)])
def test_metric_may_differ_by_its_tolerance_in_either_direction(after: int, is_change: bool) -> None:
    assert bool(find_changes({"f": {"flops": 100}}, {"f": {"flops": after}}, TOLERANCES)) == is_change


RECORD = {"machine": MACHINE, "params": {"train": {"epochs": 1}}, "costs": {"train/step": COST}}
OTHER_JAXPR = {"train/step": COST | {"jaxpr_equations": 7}}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, 0, "gate: the costs of 1 functions are those accepted"),
        ({"costs": {"train/step": COST | {"flops": 200}}, "params": {"train": {"epochs": 2}}}, 1, "100 200 2.000"),
        ({"costs": {"train/step": COST, "train/other": COST}}, 1, "train/other flops 0 100 new"),
        ({"costs": {}}, 1, "train/step flops 100 0 0.000"),
        ({"machine": MACHINE | {"architecture": "2"}, "costs": OTHER_JAXPR}, 1, "only"),
        ({"machine": MACHINE | {"jax": "2"}, "costs": OTHER_JAXPR}, 0, "only"),
    ],
)
def test_what_differs_fails_until_it_is_accepted(
    changes: dict[str, Any],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of another machine or version, only metrics that must be equal there too are compared."""
    monkeypatch.setattr(cost_gate, "ACCEPTED", tmp_path / "accepted.json")
    with pytest.raises(UserError, match=r"accepted\.json: no such file; `gradtrail gate --accept` writes it$"):
        cost_gate.run_gate(accept=False)
    for record, accept, expected in (
        (RECORD, True, 0),
        (RECORD | changes, False, status),
        (RECORD | changes, True, 0),
        (RECORD | changes, False, 0),
    ):
        monkeypatch.setattr(cost_gate, "measure", lambda record=record: record)
        assert cost_gate.run_gate(accept=accept) == expected
    output = " ".join(capsys.readouterr().out.split())
    assert words in output
    assert ("train.epochs" in output) == ("params" in changes)
    assert ("`gradtrail gate --accept` accepts the current costs" in output) == bool(status)


@pytest.mark.nightly
def test_accepted_costs_are_reproduced_for_any_instruction_set(tmp_path: Path) -> None:
    """In a process of its own, as `make gate` does it; a planted change of the params is found."""
    project: Project = copy_project(tmp_path / "project")
    (project.folder / "benchmarks").mkdir()
    (project.folder / ACCEPTED).write_bytes((ROOT / ACCEPTED).read_bytes())
    env = {"PYTHONPATH": str(project.folder / "src")}
    for flags in ("", "--xla_cpu_max_isa=SSE4_2"):
        assert "functions are those accepted" in project.run(
            "python", "-m", "gradtrail", "gate", env=env | {"XLA_FLAGS": flags}
        )
    project.set("train.mlp.hidden", [512, 128])
    output = project.run("python", "-m", "gradtrail", "gate", env=env, status=1)
    assert "train.mlp.hidden" in output
    assert "train/train_step" in output
