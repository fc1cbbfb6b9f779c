"""Small made-up results of the stages, for the tests of what shows them, keeps them or reads them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from factories import NUM_CLASSES

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import EPOCH_SCORES, MEAN, GradientAnalysis, epoch_column
from gradtrail.core.gradients.chunks import ClassStructure
from gradtrail.core.noise_scale import NoiseScale
from gradtrail.core.profile.benchmark import MachineRates, Variant
from gradtrail.stages.dp.guarantee import PrivacyGuarantee
from gradtrail.stages.profile.timings import Timings


def gradient_analysis(sizes: Mapping[str, int], *, num_classes: int = NUM_CLASSES) -> GradientAnalysis:
    """An analysis of random splits of these sizes, at epochs 0 and 2, its figures drawn at random."""
    rng = np.random.default_rng(0)
    names = ("el2n", "entropy", "grad_norm", "grad_norm_layers/0", "input_norm", "loss", "margin", "probability")
    names += ("alignment", "class_alignment")
    names += tuple(epoch_column(name, epoch) for name in EPOCH_SCORES for epoch in (0, 2))
    names += tuple(f"{name}{MEAN}" for name in EPOCH_SCORES)
    scores = {
        split: {name: rng.uniform(0.1, 1, size).astype(np.float32) for name in names}
        | {"predicted": rng.integers(0, num_classes, size, dtype=np.int32)}
        for split, size in sizes.items()
    }
    matrix = rng.normal(size=(num_classes, num_classes))
    return GradientAnalysis(
        scores=scores,
        noise_scales={
            0: NoiseScale(trace=6.0, squared_norm=2.0, low=2.5, high=3.5),
            2: NoiseScale(trace=4.0, squared_norm=-1.0, low=900.0, high=np.inf),
        },
        sharpness={0: 4.2, 2: 31.0},
        classes=ClassStructure(cosine=matrix, coherence=matrix / 9, share=np.full(num_classes, 1 / num_classes)),
    )


def a_guarantee(**changes: Any) -> PrivacyGuarantee:
    promise = PrivacyGuarantee(
        epsilon=3.0,
        epsilon_each=3.0,
        epsilon_rdp=3.2,
        delta=1e-5,
        noise_multiplier=1.5,
        example_clip_norm=1.0,
        sampling="poisson",
        batch_size=64,
        num_examples=640,
        steps=30,
        members=1,
        augmentation_multiplicity=1,
        has_secret=True,
        release=False,
    )
    return dataclasses.replace(promise, **changes)


def learning_dynamics(num_examples: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "forgetting_events": rng.integers(0, 3, num_examples, dtype=np.int32),
        "first_correct_epoch": rng.integers(0, 3, num_examples, dtype=np.int32),
        "mean_probability": rng.uniform(size=num_examples).astype(np.float32),
        "probability_std": rng.uniform(size=num_examples).astype(np.float32),
    }


CONFIGURED = Variant(precision="float32", batch_size=32, remat=False)


def _variants() -> dict[Variant, tuple[str, ...]]:
    alternatives = [{"batch_size": 16}, {"batch_size": 64}, {"precision": "bfloat16"}, {"remat": True}]
    variants = {dataclasses.replace(CONFIGURED, **difference): ("train_step",) for difference in alternatives}
    return {CONFIGURED: ("train_step", "predict", "score"), **variants}


def cost_rows() -> list[dict[str, Any]]:
    """Static costs: of the configured variant all functions, of the others the training step."""
    counted = {"jaxpr_equations": 10, "hlo_instructions": 30, "hlo_fusions": 4, "data_dependent_loops": 0}
    return [
        {"function": name, **dataclasses.asdict(variant), **counted}
        | {"flops": 100 * variant.batch_size, "bytes_accessed": 90 + 10 * variant.batch_size}
        | {"touched_bytes": 80 + 10 * variant.batch_size, "temporary_bytes": variant.batch_size**2 - 256}
        | {"total_bytes": 1000 + variant.batch_size**2}
        for variant, names in _variants().items()
        for name in names
    ]


def timings_of() -> Timings:
    """Times of the variants of `cost_rows`: 10 ms, and 1 ms for each example in a batch."""
    rows = [
        {"function": name, **dataclasses.asdict(variant), "seconds": 0.01 + 0.001 * variant.batch_size}
        | {"examples_per_second": variant.batch_size / (0.01 + 0.001 * variant.batch_size)}
        | {"flops_per_second": 2e9, "arithmetic_intensity": 2.0, "data_dependent_loops": 0}
        | {"share_of_matmul_rate": 0.2, "trace_seconds": 0.1, "lower_seconds": 0.1, "compile_seconds": 1.0}
        | {"cached": False, "first_call_seconds": 0.01, "steps_per_epoch": 430}
        for variant, names in _variants().items()
        for name in names
    ]
    return Timings(rows=rows, rates=MachineRates(flops_per_second=1e10, bytes_per_second=1e10), precisions={})


def suspects_table(splits: Mapping[str, Split], *, num_classes: int = NUM_CLASSES) -> pd.DataFrame:
    """The audit's table: a row for each example of each split, the last one of the last split the most suspicious."""
    whole = sum(map(len, splits.values()))
    labels = np.concatenate([split.labels for split in splits.values()])
    return pd.DataFrame(
        {
            "split": np.repeat(list(splits), [len(split) for split in splits.values()]),
            "example_id": np.concatenate([split.example_id for split in splits.values()]),
            "label": labels,
            "score": np.arange(whole, dtype=np.float32),
            "proposed_label": ((labels + 1) % num_classes).astype(np.int32),
            "proposed_probability": np.linspace(0.4, 1, whole, dtype=np.float32),
            "probability_wrong": np.linspace(0, 0.9, whole, dtype=np.float32),
        }
    )
