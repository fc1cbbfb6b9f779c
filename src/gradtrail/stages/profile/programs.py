"""Compiles the variants that a profile compares."""

import contextlib
from collections.abc import Callable

import jax

from gradtrail.core.profile.variants import CompiledVariant, ProfileConfig, compile_variant, variants_to_compare
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.setup import cache_disabled


def compile_variants(
    config: ProfileConfig,
    train_config: TrainConfig,
    info: DatasetInfo,
    *,
    compiler: Compiler,
    cold: bool,
    advance: Callable[..., object],
) -> list[CompiledVariant]:
    """Compile all variants, the configured one first.

    Args:
        config: which variants to compare.
        train_config: the training that they are variants of.
        info: shapes and sizes of the data set.
        compiler: records the functions of the configured variant.
        cold: whether to compile the configured variant without the persistent cache, so that its compile times are
            those of a first run.
        advance: called with a `message` after each variant.
    """
    compiled: list[CompiledVariant] = []
    for variant in variants_to_compare(config, train_config):
        with cache_disabled() if cold and not compiled else contextlib.nullcontext():
            functions = compile_variant(
                train_config,
                variant,
                image_shape=info.image_shape,
                num_classes=info.num_classes,
                num_examples=info.examples["train"],
                devices=jax.local_devices(),
                compiler=compiler,
            )
        compiled.append(functions)
        advance(message=f"compiled {variant.label}")
    return compiled


def num_pieces(config: ProfileConfig, train_config: TrainConfig, *, timed: bool) -> int:
    """Return how many pieces of work a profile has, for its progress bar: the variants, and two timings if any."""
    return len(variants_to_compare(config, train_config)) + 2 * timed
