"""Params out of their bounds are refused in one line, which names the key and the value."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from factories import (
    NETWORKS,
    OPTIMIZERS,
    SCHEDULES,
    SMALL_CNN,
    gradients_config,
    preprocess_config,
    private_config,
    profile_config,
    train_config,
)

from gradtrail.core.config import Bounds
from gradtrail.core.evaluate import EvaluateConfig
from gradtrail.core.export import ExportConfig
from gradtrail.stages.common.environment import EnvironmentConfig
from gradtrail.stages.report.page import ReportConfig

TRAIN = train_config()
MIXUP = dataclasses.replace(TRAIN.augmentation, mixup=0.2)
EXPORT = ExportConfig(name="digits", batch_sizes=(1, 8), precisions=("bfloat16",))
EVALUATE = EvaluateConfig(weights="final", batch_size=1, calibration_bins=1, num_mistakes=1)
WRONG: list[tuple[Any, dict[str, tuple]]] = [
    (
        TRAIN,
        {
            "seed": (-1, 2**32),
            "epochs": (0,),
            "batch_size": (0,),
            "accumulation_steps": (0,),
            "clip_norm": (0.0,),
            "average_decay": (0.0, 1.0),
            "patience": (0,),
            "keep_epochs": ((0, -1),),
        },
    ),
    (
        TRAIN.loss_scaling,
        {
            "minimum": (0.0,),
            "initial": (0.5,),
            "growth_factor": (1.0,),
            "backoff_factor": (0.0, 1.0),
            "growth_interval": (0,),
        },
    ),
    (TRAIN.loss, {"label_smoothing": (1.0, -0.1)}),
    (SCHEDULES["constant"], {"warmup_fraction": (1.0,)}),
    (SCHEDULES["cosine"], {"end_fraction": (-0.1,)}),
    (SCHEDULES["warmup_cosine"], {"warmup_fraction": (1.0,), "end_fraction": (1.1,)}),
    (SCHEDULES["linear"], {"end_fraction": (1.1,)}),
    (SCHEDULES["exponential"], {"end_fraction": (0.0,)}),
    (SCHEDULES["piecewise"], {"boundaries": ((0.5, 1.0), (0.5, 0.5)), "factor": (0.0,)}),
    (SCHEDULES["one_cycle"], {"warmup_fraction": (0.0,), "div_factor": (0.5,), "final_div_factor": (0.5,)}),
    (TRAIN.augmentation, {"shift": (-1.0,), "rotation": (181.0,), "scale": (1.0,), "shear": (90.0,), "cutout": (-1,)}),
    (TRAIN.augmentation, {"crop": (-1,), **dict.fromkeys(("brightness", "contrast", "saturation"), (-0.1, 1.1))}),
    (TRAIN.augmentation, {"mixup": (-0.1, 101.0)}),
    (TRAIN.changes, {"omit_fraction": (-0.1, 1.0), "omit_seed": (-1,)}),
    (NETWORKS["mlp"], {"hidden": ((), (5, -1)), "dropout": (-0.1, 1.0)}),
    (
        dataclasses.replace(SMALL_CNN, channels=(4, 6)),
        {
            "channels": ((), (4, 0)),
            "hidden": ((0,),),
            "convolutions": (0,),
            "kernel_size": (0, 4),
            "groups": (0,),
            "dropout": (1.0,),
        },
    ),
    (preprocess_config(), {"validation_fraction": (0.0, 1.0), "subset_fraction": (0.0,), "label_noise": (1.0,)}),
    (EVALUATE, {"batch_size": (0,), "calibration_bins": (0,), "num_mistakes": (0,)}),
    (ReportConfig(title="A title"), {"title": ("", "  ", "x" * 201)}),
    (
        EnvironmentConfig(cpu_threads=2, xla_flags=(), processor="any"),
        {
            "cpu_threads": (0,),
            "xla_flags": (("xla_x=1",), ("--xla_x=1 --xla_y=2",), ("--xla_gpu_deterministic_ops=false",)),
        },
    ),
    (EXPORT, {"batch_sizes": ((), (8, 1), (0, 8), (65537,)), "name": ("", "a/b", "@a", "a b", "a" * 101)}),
    (
        gradients_config(),
        {
            "top_fraction": (0.0, 1.1),
            "num_largest": (0,),
            "bootstrap_samples": (99,),
        },
    ),
    (
        profile_config(smallest_batch_size=33, largest_batch_size=64),
        {"precisions": ((),), "smallest_batch_size": (0,), "largest_batch_size": (4, 63), "steps": (1,)},
    ),
    *((optimizer, {key: (-0.1,) for key in vars(optimizer) if key != "nesterov"}) for optimizer in OPTIMIZERS.values()),
]


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [(config, key, value) for config, keys in WRONG for key, values in keys.items() for value in values],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else str(value)[:20],
)
def test_values_out_of_range_are_refused_by_name(config: Any, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}[^\n]*$"):
        dataclasses.replace(config, **{key: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dataclasses.replace(SMALL_CNN, channels=(4, 6), groups=4, norm="group"),
            r"groups must divide every one of channels \[4, 6\], got 4$",
        ),
        (lambda: train_config(accumulation_steps=3), "accumulation_steps must divide batch_size 4, got 3$"),
        (
            lambda: train_config(augmentation=MIXUP, changes=dataclasses.replace(TRAIN.changes, omit=(3,))),
            r"augmentation\.mixup must be 0 with changes .*, got 0\.2: a removed example would stay in other images$",
        ),
        (
            lambda: private_config(augmentation=MIXUP),
            r"augmentation\.mixup must be 0 with privacy\.enabled, got 0\.2: .*gradients of other examples$",
        ),
        (
            lambda: train_config(members=2, vary=("dropout",)),
            r"vary must .*initialization or order, got \['dropout'\]: all members would be the same",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-1, {"at_least": 0}, "share must be at least 0, got -1"),
        (0, {"above": 0}, "share must be above 0, got 0"),
        (1.5, {"at_most": 1}, "share must be at most 1, got 1.5"),
        (1.0, {"at_least": 0, "below": 1}, "share must be at least 0 and below 1, got 1.0"),
        (math.nan, {"above": 0}, "share must be above 0, got nan"),
    ],
)
def test_message_names_every_bound(value: float, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        Bounds(**bounds).check("share", value)
    assert str(caught.value) == message
