"""Compiling the variants of a profile."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from gradtrail.core.batching import WINDOW
from gradtrail.core.profile.variants import (
    CompiledVariant,
    ProfileConfig,
    Variant,
    compile_variant,
    variants_to_compare,
)
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.setup import cache_disabled
from gradtrail.support.running_time import allowed_cores


def compile_variants(
    config: ProfileConfig,
    train_config: TrainConfig,
    info: DatasetInfo,
    *,
    compiler: Compiler,
    cold: bool,
    advance: Callable[..., object],
) -> list[CompiledVariant]:
    """Compile all variants: the configured one first and alone, then the others side by side.

    Args:
        config: choice of the variants.
        train_config: the training behind the variants.
        info: description of the data set.
        compiler: compiler that records the functions of the configured variant.
        cold: True to compile the configured variant without the persistent cache, so that its compile times are those
            of a first run.
        advance: function that is called with a `message` after each variant.
    """
    of_data: dict[str, Any] = {"image_shape": info.image_shape, "num_classes": info.num_classes}
    most = max(WINDOW, train_config.batch_size, config.largest_batch_size)  # the cost of a step does not depend on it
    of_data |= {"num_examples": min(info.examples["train"], most), "devices": jax.local_devices()}

    def compiled(variant: Variant) -> CompiledVariant:
        return compile_variant(train_config, variant, **of_data, compiler=compiler)

    configured, *other_variants = variants_to_compare(config, train_config)
    with cache_disabled() if cold else contextlib.nullcontext():
        done = [compiled(configured)]  # alone: its times count
    advance(message=f"compiled {configured.label}")
    with ThreadPoolExecutor(allowed_cores()) as pool:
        for variant, made in zip(other_variants, pool.map(compiled, other_variants), strict=True):
            done.append(made)
            advance(message=f"compiled {variant.label}")
    return done


def num_pieces(config: ProfileConfig, train_config: TrainConfig, *, timed: bool) -> int:
    """Return the number of steps of the progress bar: the variants, and two timings if any."""
    return len(variants_to_compare(config, train_config)) + 2 * timed
