"""What a person would plant by mistake is found, and what stays within the tolerance is not."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import make_engine, new_compiler, random_split, train_config

from gradtrail.core.nn import losses
from gradtrail.core.nn.layers import Dense
from gradtrail.core.nn.models import Model
from gradtrail.core.train.loop import compile_engine, make_program
from gradtrail.core.xla.compile_events import CompileLog
from gradtrail.core.xla.compiler import Compiler
from gradtrail.experiments.cost_gate import OF_PROGRAM, OF_VERSION, TOLERANCES, costs_of, find_changes

CONFIG = train_config()


def costs() -> dict[str, dict[str, int]]:
    """Return the costs of the functions of a training."""
    compiler = new_compiler()
    model = Model(CONFIG.model_config((3, 4), 3))
    compile_engine(make_program(CONFIG, model, 10), compiler=compiler)
    return costs_of(compiler)


def changed(accepted: Mapping[str, Mapping[str, int]], found: Mapping[str, Mapping[str, int]]) -> set[str]:
    return {change.figure for change in find_changes(accepted, found, TOLERANCES) if change.function == "train_step"}


@pytest.fixture(scope="module")
def accepted() -> dict[str, dict[str, int]]:
    return costs()


def test_the_same_code_costs_the_same(accepted: dict[str, dict[str, int]]) -> None:
    assert find_changes(accepted, costs(), TOLERANCES) == []


def test_a_lost_donation_is_found(accepted: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it = Compiler.compile

    def without(self: Compiler, *args: object, donate_argnums: object = (), **options: object) -> object:
        return compile_it(self, *args, **options)

    monkeypatch.setattr(Compiler, "compile", without)
    assert {"donated_buffers", "total_bytes"} <= changed(accepted, costs())


def test_a_doubled_matmul_is_found(accepted: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Dense.__call__

    def twice(self: Dense, inputs: jax.Array) -> jax.Array:
        return call(self, inputs) + 1e-9 * call(self, jnp.sin(inputs))

    monkeypatch.setattr(Dense, "__call__", twice)
    assert {"flops", "jaxpr_equations"} <= changed(accepted, costs())


def test_a_float64_leak_is_found(accepted: dict[str, dict[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = losses.cross_entropy

    def leaking(logits: jax.Array, *args: object, **options: object) -> jax.Array:
        return entropy(logits * np.float64(1.0), *args, **options).astype(jnp.float32)

    monkeypatch.setattr(losses, "cross_entropy", leaking)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert "float64_instructions" in changed(accepted, costs())


def test_a_retrace_is_found() -> None:
    def double(values: jax.Array) -> jax.Array:
        return 2 * values

    once, twice = new_compiler(), new_compiler()
    for compiler, lengths in ((once, (3,)), (twice, (4, 3))):
        for length in lengths:
            compiler.compile("double", double, jax.ShapeDtypeStruct((length,), jnp.float32))
    (change,) = find_changes(costs_of(once), costs_of(twice), TOLERANCES)
    assert (change.figure, change.before, change.after) == ("compilations", 1, 2)


def test_a_training_meets_no_shape_that_it_was_not_compiled_for() -> None:
    engine, examples = make_engine(CONFIG, random_split(10))
    with CompileLog() as log:
        state = engine.init(jax.random.key(0))
        order = engine.order(state.key, np.int32(0))
        for start in range(2):
            state, _ = engine.run_steps(state, engine.records(), examples, order, np.int32(start), np.int32(start + 1))
    assert log.retraced() == {}


@pytest.mark.parametrize(("after", "is_change"), [(100, False), (101, False), (99, False), (102, True), (98, True)])
def test_within_its_tolerance_a_figure_may_differ_either_way(after: int, is_change: bool) -> None:
    assert bool(find_changes({"f": {"flops": 100}}, {"f": {"flops": after}}, TOLERANCES)) == is_change


def test_a_function_that_is_new_or_gone_is_a_change() -> None:
    cost = dict.fromkeys(TOLERANCES, 1)
    (*_, change) = find_changes({"old": cost}, {"new": cost}, TOLERANCES)
    assert (change.function, change.before, change.after) == ("new", None, 1)
    assert np.isnan(change.ratio)


def test_elsewhere_only_what_must_be_equal_there_is_compared() -> None:
    assert OF_PROGRAM < OF_VERSION < set(TOLERANCES)
    before, after = {"f": {"flops": 1, "output_bytes": 8}}, {"f": {"flops": 2, "output_bytes": 4}}
    assert [change.figure for change in find_changes(before, after, OF_VERSION)] == ["output_bytes"]
