"""Every variant compiles on shapes alone, and a larger batch costs more."""

import pytest
from factories import NUM_CLASSES, SHAPE, new_compiler, train_config

from gradtrail.core.precision import Precision
from gradtrail.core.profiling import ProfileConfig, Variant, compile_variant


def variant(precision: Precision, batch_size: int) -> Variant:
    return compile_variant(
        train_config(),
        precision,
        batch_size,
        image_shape=SHAPE,
        num_classes=NUM_CLASSES,
        num_examples=64,
        compiler=new_compiler(),
    )


def test_low_precision_compiles_and_keeps_its_name() -> None:
    low = variant("bfloat16", 4)
    assert (low.precision, low.batch_size, len(low.functions)) == ("bfloat16", 4, 3)


def test_costs_grow_with_the_batch() -> None:
    small, large = variant("float32", 4), variant("float32", 16)
    for few, many in zip(small.functions, large.functions, strict=True):
        assert few.name == many.name
        assert few.cost.flops < many.cost.flops
        assert few.cost.bytes_accessed < many.cost.bytes_accessed
    assert [function.name for function in large.functions] == ["train_step", "predict", "score"]


@pytest.mark.parametrize(
    ("precisions", "batch_sizes", "key"),
    [((), (1,), "precisions"), (("float32",), (), "batch_sizes"), (("float32",), (0,), "batch_sizes")],
)
def test_nothing_to_compare_is_refused_by_name(
    precisions: tuple[Precision, ...], batch_sizes: tuple[int, ...], key: str
) -> None:
    with pytest.raises(ValueError, match=f"^{key}"):
        ProfileConfig(precisions=precisions, batch_sizes=batch_sizes)
