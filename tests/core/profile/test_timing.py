"""Timings come from the clock alone, rates are work over time, and each variant stands once."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, cases, new_compiler, profile_config, random_split, train_config

from gradtrail.core.batching import PADDING
from gradtrail.core.nn.models import Model
from gradtrail.core.profile import benchmark
from gradtrail.core.profile.benchmark import (
    CompiledVariant,
    FunctionTime,
    Variant,
    _order,
    compile_variant,
    interleaved,
    random_state,
    time_variants,
    variants_to_compare,
)
from gradtrail.core.train.loop import TrainingFunctions, on_device
from gradtrail.core.train.privacy import NOT_PRIVATE


def ticking(seconds: float = 1.0) -> Callable[[], float]:
    """A clock that goes on by so much whenever somebody looks."""
    count = itertools.count()
    return lambda: seconds * next(count)


@functools.cache
def compiled(
    num_examples: int = 10, *, is_private: bool = False, parts: int = 1, **differences: Any
) -> CompiledVariant:
    """A variant whose functions do not time their own calls."""
    variant = Variant(**({"precision": "float32", "batch_size": 4, "remat": False} | differences))
    shapes = {"image_shape": SHAPE, "num_classes": NUM_CLASSES, "num_examples": num_examples}
    privacy = dataclasses.replace(NOT_PRIVATE, enabled=is_private)
    config = train_config(batch_size=4, model="linear", accumulation_steps=parts, privacy=privacy)
    made = compile_variant(config, variant, compiler=new_compiler(), **shapes)
    functions = {name: dataclasses.replace(item, calls=None) for name, item in made.functions.items()}
    return dataclasses.replace(made, functions=functions)


def times_of(*variants: CompiledVariant, steps: int, seconds: float, clock: Callable[[], float]) -> list[FunctionTime]:
    return time_variants(variants, profile_config(steps=steps, seconds=seconds), NUM_CLASSES, clock)


@pytest.mark.parametrize(("seconds", "made"), [(7.0, 7), (100.0, 9), (0.5, 6)])
def test_calls_fit_the_budget_and_the_minimum(seconds: float, made: int) -> None:
    calls: list[int] = []
    (positions,) = interleaved([lambda: calls.append(1)], ticking(), seconds=seconds)
    assert positions == [1.0] * made
    assert len(calls) == made


def test_batches_of_a_private_training_have_their_mean_size_and_padding() -> None:
    variant = compiled(40, is_private=True)
    order = _order(40, variant)
    assert order.shape[1] > 4
    assert ((order != PADDING).sum(axis=1) == 4).all()
    times = times_of(variant, steps=2, seconds=1.0, clock=ticking())
    assert [item.function for item in times] == ["train_step", "predict", "score"]
    assert _order(10, compiled()).shape == (3, 4)


@pytest.mark.parametrize(("num_examples", "seconds", "count"), [(10, 1000.0, 7), (4, 1000.0, 7), (10, 1.0, 1)])
def test_time_of_a_step_is_that_of_a_round_over_its_steps(num_examples: int, seconds: float, count: int) -> None:
    """The clock says one second for a round, whatever is in it; an epoch may have fewer steps than are timed."""
    variant = compiled(num_examples)
    step = variant.functions["train_step"]
    bounds: list[tuple[int, int]] = []

    def call(*args: Any) -> Any:
        bounds.append((int(args[-2]), int(args[-1])))
        return step.call(*args)

    watched = dataclasses.replace(
        variant, functions=variant.functions | {"train_step": dataclasses.replace(step, call=call)}
    )
    times = times_of(watched, steps=7, seconds=seconds, clock=ticking())
    for item in times:
        assert item.rounds == pytest.approx((1 / count,) * (9 if seconds > 1 else 6))
        assert item.seconds == pytest.approx(1 / count)
    assert all(0 <= start < stop <= variant.training.steps_per_epoch for start, stop in bounds)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_timed_steps_stay_finite(optimizer: str) -> None:
    """Arithmetic on NaN and infinity may take another time."""
    config = train_config(optimizer=optimizer, precision="float16", batch_size=4, model="linear")
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    training = TrainingFunctions(config, model, 8, jax.local_devices())
    split = random_split(8)
    examples, order = on_device(split.images, split.labels, training.mesh), np.arange(8, dtype=np.int32).reshape(2, 4)
    state, record = jax.jit(training.recorded_step)(
        random_state(training), training.empty_records(), examples, order, np.int32(0)
    )
    leaves = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state, record)) if leaf.dtype == np.float32]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert not np.any(record.metrics["skipped"])


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

    times = times_of(*map(slowing, variants), steps=2, seconds=1.0, clock=lambda: now[0])
    assert order[-12:] == ["float32", "float16"] * 6, "a slow function has six rounds"
    assert [half / whole for whole, half in zip(times[0].rounds, times[1].rounds, strict=True)] == [3.0] * 6


def test_rates_are_the_work_by_the_shortest_time() -> None:
    ticks = itertools.accumulate(itertools.cycle([0.0, 1.0, *[0.0, 4.0] * 3, 0.0, 2.0, *[0.0, 3.0] * 2]))
    rates = benchmark.measure_rates(lambda: next(ticks))  # the first call, which takes 1, is the warm-up
    assert rates.flops_per_second == pytest.approx(2 * 768**3 / 2)
    assert rates.bytes_per_second == pytest.approx(2 * 32 * 2**20 / 2)


@pytest.mark.parametrize("remat", [False, True])
def test_every_variant_differs_in_one_respect_and_stands_once(remat: bool) -> None:
    config = profile_config(precisions=("float32", "bfloat16"), smallest_batch_size=2, largest_batch_size=16)
    configured, *other_values = variants_to_compare(config, train_config(batch_size=4, remat=remat, model="cnn"), 16)
    assert configured == Variant(precision="float32", batch_size=4, remat=remat)
    assert set(other_values) == {
        Variant(precision="bfloat16", batch_size=4, remat=remat),
        Variant(precision="float32", batch_size=2, remat=remat),
        Variant(precision="float32", batch_size=8, remat=remat),
        Variant(precision="float32", batch_size=16, remat=remat),
        Variant(precision="float32", batch_size=4, remat=not remat),
    }
    assert len(other_values) == len(set(other_values))
    assert {item.remat for item in variants_to_compare(config, train_config(remat=remat), 16)} == {remat}, "no blocks"


@pytest.mark.parametrize(
    ("smallest", "largest", "parts", "sizes"),
    [(1, 1, 1, {12, 1}), (3, 8, 1, {12, 4, 8}), (5, 16, 1, {12, 8}), (1, 8, 4, {12, 4, 8}), (2, 2, 1, {12, 2})],
)
def test_batch_sizes_are_the_powers_of_two_between_the_bounds_that_come_in_parts(
    smallest: int, largest: int, parts: int, sizes: set[int]
) -> None:
    config = profile_config(precisions=("bfloat16",), smallest_batch_size=smallest, largest_batch_size=largest)
    training = train_config(batch_size=12, accumulation_steps=parts, precision="float16")
    configured, *_ = result = variants_to_compare(config, training, 14)
    assert (configured.precision, configured.batch_size) == ("float16", 12)
    assert {item.batch_size for item in result} == sizes


def test_other_variants_have_a_training_step_alone() -> None:
    assert list(compiled().functions) == ["train_step", "predict", "score"]
    assert list(compiled(batch_size=8).functions) == list(compiled(precision="float16").functions) == ["train_step"]


@pytest.mark.parametrize("parts", cases((1, 2), fast=(1,)))
def test_touched_bytes_do_not_depend_on_the_size_of_the_split(parts: int) -> None:
    small, large = (compiled(count, parts=parts) for count in (10, 74))
    example = SHAPE[0] * SHAPE[1] + 4  # uint8 pixels and an int32 label
    accessed = [item.functions["train_step"].cost.bytes_accessed for item in (small, large)]
    assert jax.default_backend() == "cpu"
    assert accessed[1] - accessed[0] >= 64 * example, "the compiler counts the whole split"
    touched = [item.functions["train_step"].cost.touched_bytes for item in (small, large)]
    assert touched[1] - touched[0] < example, "only the order has more entries"
    if parts == 1:
        assert touched[0] == accessed[0] - 6 * example
    predict = small.functions["predict"].cost
    assert predict.touched_bytes == predict.bytes_accessed
