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


def test_configured_variant_may_differ_from_those_to_compare() -> None:
    config = profile_config(precisions=("bfloat16",), smallest_batch_size=2, largest_batch_size=2)
    result = variants_to_compare(config, train_config(batch_size=3, precision="float16"))
    assert [(item.precision, item.batch_size) for item in result[:1]] == [("float16", 3)]
    assert {item.batch_size for item in result} == {2, 3}


def test_batch_sizes_that_do_not_come_in_parts_are_left_out() -> None:
    config = profile_config(smallest_batch_size=1, largest_batch_size=8)
    result = variants_to_compare(config, train_config(batch_size=12, accumulation_steps=4))
    assert {item.batch_size for item in result} == {12, 4, 8}


@pytest.mark.parametrize(
    ("smallest", "largest", "sizes"), [(1, 1, (1,)), (3, 8, (4, 8)), (64, 512, (64, 128, 256, 512)), (5, 15, (8,))]
)
def test_batch_sizes_are_the_powers_of_two_between_the_bounds(
    smallest: int, largest: int, sizes: tuple[int, ...]
) -> None:
    assert profile_config(smallest_batch_size=smallest, largest_batch_size=largest).batch_sizes == sizes


@pytest.mark.parametrize(
    ("differences", "names"),
    [
        ({}, ["train_step", "predict", "score"]),
        ({"precision": "bfloat16"}, ["train_step", "predict", "score"]),
        ({"batch_size": 8}, ["train_step"]),
        ({"remat": True}, ["train_step"]),
    ],
)
def test_functions_of_each_variant(differences: dict[str, Any], names: list[str]) -> None:
    assert list(compiled(**differences).functions) == names


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
