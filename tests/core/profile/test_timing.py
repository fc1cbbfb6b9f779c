"""Timings come from the clock alone, rates are work over time, and each variant stands once."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, new_compiler, profile_config, random_split, train_config
from hypothesis import given
from hypothesis import strategies as st

from gradtrail.core.batching import PADDING
from gradtrail.core.nn.models import Model
from gradtrail.core.profile import benchmark
from gradtrail.core.profile.benchmark import Bench, _order, interleaved, random_state, steps_until_it_pays
from gradtrail.core.profile.variants import CompiledVariant, Variant, compile_variant, variants_to_compare
from gradtrail.core.train.loop import make_program, on_device
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.xla.compiler import CallTimes, Compiler, CompileTimes


def ticking(seconds: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by so much whenever somebody looks."""
    count = itertools.count()
    return lambda: seconds * next(count)


@functools.cache
def compiled(
    num_examples: int = 10, *, is_private: bool = False, accumulation_steps: int = 1, **differences: Any
) -> CompiledVariant:
    """A variant whose functions do not time their own calls."""
    variant = Variant(**({"precision": "float32", "batch_size": 4, "remat": False} | differences))
    shapes = {"image_shape": SHAPE, "num_classes": NUM_CLASSES, "num_examples": num_examples, "devices": jax.devices()}
    privacy = dataclasses.replace(NOT_PRIVATE, enabled=is_private)
    config = train_config(batch_size=4, accumulation_steps=accumulation_steps, privacy=privacy)
    made = compile_variant(config, variant, compiler=new_compiler(), **shapes)
    return with_calls(made, None)


def with_calls(variant: CompiledVariant, calls: CallTimes | None) -> CompiledVariant:
    functions = {name: dataclasses.replace(item, calls=calls) for name, item in variant.functions.items()}
    return dataclasses.replace(variant, functions=functions)


def bench(steps: int, seconds: float) -> Bench:
    return Bench(profile_config(steps=steps, seconds=seconds), NUM_CLASSES, new_compiler(ticking()))


@given(st.floats(0, 1e3), st.floats(1e-6, 10), st.floats(1e-6, 10))
def test_compiling_pays_after_the_first_step_at_which_the_sums_cross(overhead: float, slow: float, fast: float) -> None:
    steps = steps_until_it_pays(overhead, slow=slow, fast=fast)
    if slow <= fast:
        assert steps == (1 if overhead == 0 and slow == fast else math.inf)
    else:
        assert steps >= 1
        assert overhead + steps * fast <= steps * slow * (1 + 1e-9) + 1e-9
        if steps > 1:
            assert overhead + (steps - 1) * fast > (steps - 1) * slow * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize(("seconds", "most", "made"), [(5.0, 100, 5), (5.0, 3, 3), (0.5, 100, 2), (9.0, 1, 2)])
def test_calls_fit_the_budget_and_the_minimum(seconds: float, most: int, made: int) -> None:
    calls: list[int] = []
    (positions,) = interleaved([lambda: calls.append(1)], ticking(), seconds=seconds, least=2, most=most)
    assert positions == [1.0] * made
    assert len(calls) == made


def test_batches_of_a_private_training_have_their_mean_size_and_padding() -> None:
    variant = compiled(40, is_private=True)
    order = _order(40, variant)
    assert order.shape[1] > 4
    assert ((order != PADDING).sum(axis=1) == 4).all()
    assert len(bench(2, 1.0).time_functions([variant])) == 3
    assert _order(10, compiled()).shape == (3, 4)


@pytest.mark.parametrize(("seconds", "steps", "count"), [(1000.0, 7, 7), (1.0, 7, 1)])
def test_time_of_a_step_is_that_of_a_round_over_its_steps(seconds: float, steps: int, count: int) -> None:
    """The clock says one second for a round, whatever is in it."""
    variant = compiled()
    times = bench(steps, seconds).time_functions([variant])
    assert [item.function for item in times] == ["train_step", "predict", "score"]
    for item in times:
        cost = variant.functions[item.function].cost
        assert item.rounds == pytest.approx((1 / count,) * (9 if seconds > 1 else 6))
        assert item.seconds == pytest.approx(1 / count)
        assert item.examples_per_second == pytest.approx(4 * count)
        assert item.flops_per_second == pytest.approx(cost.flops * count)
        assert item.bytes_per_second == pytest.approx(cost.touched_bytes * count)
        assert item.arithmetic_intensity == pytest.approx(cost.flops / cost.touched_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [4, 10])
def test_steps_are_timed_in_three_ways(num_examples: int) -> None:
    """Also where an epoch has fewer steps than are timed."""
    variant = compiled(num_examples)
    step = variant.functions["train_step"]
    took = CompileTimes(trace_seconds=1.0, lower_seconds=2.0, compile_seconds=4.0)
    bounds: list[tuple[int, int]] = []

    def call(*args: Any) -> Any:
        bounds.append((int(args[-2]), int(args[-1])))
        return step.call(*args)

    variant = dataclasses.replace(variant, functions={"train_step": dataclasses.replace(step, call=call, times=took)})
    locked: list[str] = []

    @contextlib.contextmanager
    def guard(program: str) -> Iterator[None]:
        locked.append(program)
        yield
        locked.append("released")

    compiler = Compiler(ticking(), guard)
    times = Bench(profile_config(steps=6, seconds=1e6), NUM_CLASSES, compiler).time_steps(variant)
    assert [len(item) for item in locked] == [64, 8], "no other process compiles the same operations beside this one"
    assert all(0 <= start < stop <= variant.program.steps_per_epoch for start, stop in bounds)
    assert (times.steps_without_jit, times.steps_with_jit) == (6, 6)
    assert times.without_jit == 1.0
    assert (times.one_by_one, times.scanned) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert times.compile_seconds == 7.0


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adam", "lion")),
        "adamw",
        "muon",
        "schedule_free",
    ],
)
def test_timed_steps_stay_finite(optimizer: str) -> None:
    """Arithmetic on NaN and infinity may take another time."""
    config = train_config(optimizer=optimizer, precision="float16", batch_size=4)
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    program = make_program(config, model, 8, jax.local_devices())
    split = random_split(8)
    examples, order = on_device(split.images, split.labels, program.mesh), np.arange(8, dtype=np.int32).reshape(2, 4)
    state, record = jax.jit(program.recorded_step)(
        random_state(program), program.records(), examples, order, np.int32(0)
    )
    leaves = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state, record)) if leaf.dtype == np.float32]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert not np.any(record.skipped)


def test_functions_are_timed_interleaved() -> None:
    """A machine that slows down between two rounds slows all functions down alike."""
    now, order = [0.0], []
    variants = [compiled(), compiled(precision="float16")]

    def slowing(variant: CompiledVariant) -> CompiledVariant:
        step = variant.functions["train_step"]

        def call(*args: Any) -> Any:
            order.append(variant.variant.precision)
            now[0] += 2.0 ** ((len(order) - 1) // 2) * (3.0 if variant.variant.precision == "float16" else 1.0)
            return step.call(*args)

        return dataclasses.replace(variant, functions={"train_step": dataclasses.replace(step, call=call)})

    config = profile_config(steps=2, seconds=1.0)
    times = Bench(config, NUM_CLASSES, new_compiler(lambda: now[0])).time_functions([*map(slowing, variants)])
    assert order[-12:] == ["float32", "float16"] * 6, "a slow function has six rounds"
    assert [half / whole for whole, half in zip(times[0].rounds, times[1].rounds, strict=True)] == [3.0] * 6


def test_rates_are_the_work_by_the_median_of_the_times() -> None:
    ticks = itertools.accumulate(itertools.cycle([0.0, 7.0, 0.0, 1.0, 0.0, 3.0, 0.0, 2.0]))  # a call takes 7, 1, 3, 2
    rates = benchmark.measure_rates(lambda: next(ticks))
    assert rates.flops_per_second == pytest.approx(2 * benchmark._SIDE**3 / 2)
    assert rates.bytes_per_second == pytest.approx(2 * benchmark._COPIED_BYTES / 2)


@pytest.mark.parametrize("remat", [False, True])
def test_every_variant_differs_in_one_respect_and_stands_once(remat: bool) -> None:
    config = profile_config(precisions=("float32", "bfloat16"), smallest_batch_size=2, largest_batch_size=16)
    configured, *other_values = variants_to_compare(config, train_config(batch_size=4, remat=remat))
    assert configured == Variant(precision="float32", batch_size=4, remat=remat)
    assert set(other_values) == {
        Variant(precision="bfloat16", batch_size=4, remat=remat),
        Variant(precision="float32", batch_size=2, remat=remat),
        Variant(precision="float32", batch_size=8, remat=remat),
        Variant(precision="float32", batch_size=16, remat=remat),
        Variant(precision="float32", batch_size=4, remat=not remat),
    }
    assert len(other_values) == len(set(other_values))


@pytest.mark.parametrize(
    ("smallest", "largest", "parts", "sizes"),
    [(1, 1, 1, {12, 1}), (3, 8, 1, {12, 4, 8}), (5, 15, 1, {12, 8}), (1, 8, 4, {12, 4, 8}), (2, 2, 1, {12, 2})],
)
def test_batch_sizes_are_the_powers_of_two_between_the_bounds_that_come_in_parts(
    smallest: int, largest: int, parts: int, sizes: set[int]
) -> None:
    config = profile_config(precisions=("bfloat16",), smallest_batch_size=smallest, largest_batch_size=largest)
    training = train_config(batch_size=12, accumulation_steps=parts, precision="float16")
    configured, *_ = result = variants_to_compare(config, training)
    assert (configured.precision, configured.batch_size) == ("float16", 12)
    assert {item.batch_size for item in result} == sizes


def test_other_batch_sizes_and_remat_have_a_training_step_alone() -> None:
    assert list(compiled().functions) == ["train_step", "predict", "score"]
    assert list(compiled(batch_size=8).functions) == list(compiled(remat=True).functions) == ["train_step"]


@pytest.mark.parametrize("parts", [1, 2])
def test_touched_bytes_do_not_depend_on_the_size_of_the_split(parts: int) -> None:
    small, large = (compiled(count, accumulation_steps=parts) for count in (64, 128))
    example = SHAPE[0] * SHAPE[1] + 4  # uint8 pixels and an int32 label
    accessed = [item.functions["train_step"].cost.bytes_accessed for item in (small, large)]
    assert jax.default_backend() == "cpu"
    assert accessed[1] - accessed[0] >= 64 * example, "the compiler counts the whole split"
    touched = [item.functions["train_step"].cost.touched_bytes for item in (small, large)]
    assert touched[1] - touched[0] < example, "only the order has more entries"
    if parts == 1:
        assert touched[0] == accessed[0] - 60 * example
    predict = small.functions["predict"].cost
    assert predict.touched_bytes == predict.bytes_accessed
