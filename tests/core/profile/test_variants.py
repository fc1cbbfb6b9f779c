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
    configured, *others = variants_to_compare(config, train_config(batch_size=4, remat=remat))
    assert configured == Variant(precision="float32", batch_size=4, remat=remat)
    assert set(others) == {
        Variant(precision="bfloat16", batch_size=4, remat=remat),
        Variant(precision="float32", batch_size=2, remat=remat),
        Variant(precision="float32", batch_size=8, remat=remat),
        Variant(precision="float32", batch_size=16, remat=remat),
        Variant(precision="float32", batch_size=4, remat=not remat),
    }
    assert len(others) == len(set(others))


def test_the_configured_variant_need_not_be_among_those_to_compare() -> None:
    config = profile_config(precisions=("bfloat16",), smallest_batch_size=2, largest_batch_size=2)
    found = variants_to_compare(config, train_config(batch_size=3, precision="float16"))
    assert [(each.precision, each.batch_size) for each in found[:1]] == [("float16", 3)]
    assert {each.batch_size for each in found} == {2, 3}


def test_batch_sizes_that_do_not_come_in_parts_are_left_out() -> None:
    config = profile_config(smallest_batch_size=1, largest_batch_size=8)
    found = variants_to_compare(config, train_config(batch_size=12, accumulation_steps=4))
    assert {each.batch_size for each in found} == {12, 4, 8}


@pytest.mark.parametrize(
    ("smallest", "largest", "sizes"), [(1, 1, (1,)), (3, 8, (4, 8)), (64, 512, (64, 128, 256, 512)), (5, 15, (8,))]
)
def test_batch_sizes_are_the_powers_of_two_between_the_bounds(
    smallest: int, largest: int, sizes: tuple[int, ...]
) -> None:
    assert profile_config(smallest_batch_size=smallest, largest_batch_size=largest).batch_sizes == sizes


def test_costs_grow_with_the_batch() -> None:
    few, many = (each.functions["train_step"].cost for each in (compiled(), compiled(batch_size=8)))
    assert few.flops < many.flops
    assert few.bytes_accessed < many.bytes_accessed


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


def test_every_variant_is_in_the_account_and_only_the_configured_functions_are_the_compilers_own() -> None:
    compiler = new_compiler()
    other, own = compiled(compiler=compiler, batch_size=8), compiled(compiler=compiler)
    assert compiler.functions == own.functions
    assert [each.name for each in compiler.compiled] == ["train_step (float32, batch of 8)", *own.functions]
    assert compiler.compiled[0].cost == other.functions["train_step"].cost


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_touches_its_batch_whatever_the_size_of_the_split(parts: int) -> None:
    small, large = (compiled(num_examples=count, accumulation_steps=parts) for count in (64, 128))
    example = SHAPE[0] * SHAPE[1] + 4  # uint8 pixels and an int32 label
    accessed = [each.functions["train_step"].cost.bytes_accessed for each in (small, large)]
    assert jax.default_backend() == "cpu"
    assert accessed[1] - accessed[0] >= 64 * example, "the compiler counts the whole split"
    touched = [each.functions["train_step"].cost.touched_bytes for each in (small, large)]
    assert touched[1] - touched[0] < example, "only the order has more entries"
    if parts == 1:
        assert touched[0] == accessed[0] - 60 * example
    predict = small.functions["predict"].cost
    assert predict.touched_bytes == predict.bytes_accessed


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"precisions": ()}, "precisions"),
        ({"smallest_batch_size": 0}, "smallest_batch_size"),
        ({"smallest_batch_size": 8, "largest_batch_size": 4}, "largest_batch_size"),
        ({"smallest_batch_size": 33, "largest_batch_size": 63}, "largest_batch_size must be at least 64"),
        ({"steps": 1}, "steps"),
        ({"seconds": 0.0}, "seconds"),
    ],
)
def test_nothing_to_compare_is_refused_by_name(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}"):
        profile_config(**wrong)
