"""`gradtrail gate`: planted regressions are found, costs within the tolerance are not, and `--accept` accepts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import ROOT, new_compiler, train_config
from projects import Project, copy_project

from gradtrail.core.nn import losses
from gradtrail.core.nn.layers import Dense
from gradtrail.core.nn.models import Model
from gradtrail.core.train.loop import make_program
from gradtrail.core.xla.compiler import Compiler
from gradtrail.experiments import cost_gate
from gradtrail.experiments.cost_gate import ACCEPTED, TOLERANCES, costs_of, find_changes
from gradtrail.support.errors import UserError

COST = dict.fromkeys(TOLERANCES, 100)
MACHINE = {"jax": "1", "jaxlib": "1", "platform": "cpu", "architecture": "x"}


def costs() -> dict[str, dict[str, int]]:
    """Return the costs of the optimizer steps of a training."""
    config, compiler = train_config(model="linear"), new_compiler()
    make_program(config, Model(config.model_config((3, 4), 3)), 10, jax.devices()).compile_run_steps(compiler)
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
    assert {"donated_buffers", "flops", "float64_instructions"} <= {metric for _, metric, _, _ in changes}


def test_second_compilation_is_reported() -> None:
    def double(values: jax.Array) -> jax.Array:
        return 2 * values

    once, twice = new_compiler(), new_compiler()
    for compiler, lengths in ((once, (3,)), (twice, (4, 3))):
        for length in lengths:
            compiler.compile("double", double, jax.ShapeDtypeStruct((length,), jnp.float32))
    assert find_changes(costs_of(once), costs_of(twice), TOLERANCES) == [("double", "compilations", 1, 2)]


@pytest.mark.parametrize(("after", "is_change"), [(100, False), (101, False), (99, False), (102, True), (98, True)])
def test_metric_may_differ_by_its_tolerance_in_either_direction(after: int, is_change: bool) -> None:
    assert bool(find_changes({"f": {"flops": 100}}, {"f": {"flops": after}}, TOLERANCES)) == is_change


RECORD = {"machine": MACHINE, "params": {"train": {"epochs": 1}}, "costs": {"train/step": COST}}


@pytest.fixture(autouse=True)
def accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The gate measures RECORD, and accepted it."""
    monkeypatch.setattr(cost_gate, "ACCEPTED", tmp_path / "accepted.json")
    monkeypatch.setattr(cost_gate, "measure", lambda: RECORD)
    assert cost_gate.run_gate(accept=True) == 0
    return tmp_path / "accepted.json"


def test_change_fails_with_both_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"costs": {"train/step": COST | {"flops": 200}}, "params": {"train": {"epochs": 2}}}
    monkeypatch.setattr(cost_gate, "measure", lambda: RECORD | changed)
    assert cost_gate.run_gate(accept=False) == 1
    output = capsys.readouterr().out
    assert all(word in output for word in ("train/step", "flops", "100", "200", "2.000", "gradtrail gate --accept"))
    assert "params differ from the accepted ones: train.epochs" in output
    assert cost_gate.run_gate(accept=True) == 0
    assert cost_gate.run_gate(accept=False) == 0


@pytest.mark.parametrize(("key", "status"), [("architecture", 1), ("jax", 0)])
def test_message_names_the_metrics_that_are_compared_on_another_machine(
    key: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current = {"train/step": COST | {"flops": 1, "jaxpr_equations": 7}}
    other = RECORD | {"machine": MACHINE | {key: "2"}, "costs": current}
    monkeypatch.setattr(cost_gate, "measure", lambda: other)
    assert cost_gate.run_gate(accept=False) == status
    assert "comparing only argument_bytes" in " ".join(capsys.readouterr().out.split())


def test_missing_record_is_one_line(accepted: Path) -> None:
    accepted.unlink()
    with pytest.raises(UserError, match=r"accepted\.json: no such file; `gradtrail gate --accept` writes it$"):
        cost_gate.run_gate(accept=False)


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
