"""Each variant stands once, compiles on shapes alone, and a larger batch costs more."""

import functools
from typing import Any

import jax
import pytest
from factories import NUM_CLASSES, SHAPE, new_compiler, profile_config, train_config

from gradtrail.core.profile.variants import CompiledVariant, Variant, compile_variant, variants_to_compare
from gradtrail.core.xla.compiler import Compiler


@functools.cache
def compiled(
    num_examples: int = 64, compiler: Compiler | None = None, accumulation_steps: int = 1, **differences: Any
) -> CompiledVariant:
    variant = Variant(**({"precision": "float32", "batch_size": 4, "remat": False} | differences))
    return compile_variant(
        train_config(accumulation_steps=accumulation_steps),
        variant,
        image_shape=SHAPE,
        num_classes=NUM_CLASSES,
        num_examples=num_examples,
        devices=jax.devices(),
        compiler=compiler or new_compiler(),
    )


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
    small, large = (compiled(num_examples=count, accumulation_steps=parts) for count in (64, 128))
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
