"""Small made-up results of the stages, for the tests of what shows them, keeps them or reads them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from factories import NUM_CLASSES

from gradtrail.core.data import Split
from gradtrail.core.gradients.analysis import EPOCH_SCORES, MEAN, GradientAnalysis, epoch_column
from gradtrail.core.gradients.diagnostics import ClassStructure
from gradtrail.core.noise_scale import NoiseScale
from gradtrail.core.profile.benchmark import MachineRates, StepTimes
from gradtrail.core.profile.variants import Variant
from gradtrail.stages.artifacts.privacy import PrivacyGuarantee
from gradtrail.stages.profile.timings import Timings


def gradient_analysis(sizes: Mapping[str, int], *, num_classes: int = NUM_CLASSES) -> GradientAnalysis:
    """An analysis of random splits of these sizes, at epochs 0 and 2, its figures drawn at random."""
    rng = np.random.default_rng(0)
    names = ("el2n", "entropy", "grad_norm", "grad_norm_layers/0", "input_norm", "loss", "margin", "probability")
    names += ("self_influence", "alignment", "class_alignment")
    names += tuple(epoch_column(name, epoch) for name in EPOCH_SCORES for epoch in (0, 2))
    names += tuple(f"{name}{MEAN}" for name in EPOCH_SCORES)
    scores = {
        split: {name: rng.uniform(0.1, 1, size).astype(np.float32) for name in names}
        | {"predicted": rng.integers(0, num_classes, size, dtype=np.int32)}
        for split, size in sizes.items()
    }
    matrix = rng.normal(size=(num_classes, num_classes))
    influenced = np.arange(min(2, sizes["test"]))
    return GradientAnalysis(
        scores=scores,
        noise_scales={
            0: NoiseScale(trace=6.0, squared_norm=2.0, low=2.5, high=3.5),
            2: NoiseScale(trace=4.0, squared_norm=-1.0, low=900.0, high=np.inf),
        },
        classes=ClassStructure(cosine=matrix, coherence=matrix / 9, share=np.full(num_classes, 1 / num_classes)),
        influenced=influenced,
        influence=rng.normal(size=(sizes["train"], len(influenced))).astype(np.float32),
        curvature=None,
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


def cost_rows(batch_sizes: Sequence[int] = (16, 32, 64)) -> pd.DataFrame:
    """Static costs: the training step at each batch size, all functions in bfloat16 too, and the step with remat."""
    counted = {"jaxpr_equations": 10, "hlo_instructions": 30, "hlo_fusions": 4, "data_dependent_loops": 0}
    rows = [
        {"function": name, **dataclasses.asdict(variant), **counted}
        | {"flops": 100 * variant.batch_size, "bytes_accessed": 90 + 10 * variant.batch_size}
        | {"touched_bytes": 80 + 10 * variant.batch_size, "temporary_bytes": variant.batch_size**2 - 256}
        | {"total_bytes": 1000 + variant.batch_size**2}
        for variant, names in _variants(batch_sizes).items()
        for name in names
    ]
    return pd.DataFrame(rows)


def step_times(**overrides: Any) -> StepTimes:
    times = StepTimes(
        without_jit=0.1,
        steps_without_jit=5,
        steps_with_jit=50,
        one_by_one=0.001,
        scanned=0.0008,
        compile_seconds=2.0,
    )
    return dataclasses.replace(times, **overrides)


def timings_of(batch_sizes: Sequence[int] = (16, 32, 64)) -> Timings:
    """Times of the variants of `cost_rows`: 10 ms and 1 ms for each example in a batch."""
    rows = [
        {"function": name, **dataclasses.asdict(variant), "seconds": 0.01 + 0.001 * variant.batch_size}
        | {"examples_per_second": variant.batch_size / (0.01 + 0.001 * variant.batch_size)}
        | {"flops_per_second": 2e9, "bytes_per_second": 1e9, "arithmetic_intensity": 2.0, "data_dependent_loops": 0}
        | {"share_of_matmul_rate": 0.2, "share_of_copy_rate": 0.1, "temporary_mib": 1.5, "total_mib": 4.0}
        for variant, names in _variants(batch_sizes).items()
        for name in names
    ]
    pieces = {"trace": 0.1, "lower": 0.1, "compile": 1.0, "first call": 0.01, "calls": 430, "an epoch": 0.5}
    return Timings(
        functions=pd.DataFrame(rows),
        times=pd.DataFrame([{"function": name, **pieces} for name in ("train_step", "predict", "score")]),
        steps=step_times(),
        rates=MachineRates(flops_per_second=1e10, bytes_per_second=1e10),
        precisions={},
    )


def _variants(batch_sizes: Sequence[int]) -> dict[Variant, tuple[str, ...]]:
    everything = ("train_step", "predict", "score")
    found: dict[Variant, tuple[str, ...]] = {
        CONFIGURED: everything,
        dataclasses.replace(CONFIGURED, precision="bfloat16"): everything,
        dataclasses.replace(CONFIGURED, remat=True): ("train_step",),
    }
    return {dataclasses.replace(CONFIGURED, batch_size=size): ("train_step",) for size in batch_sizes} | found


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
