"""Small valid instances of what the code works on; a test names only what it is about."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Array

from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.common.split import Split
from gradtrail.core.data.config import AugmentationConfig
from gradtrail.core.data.preprocessing import PreprocessConfig
from gradtrail.core.gradients.analysis import FOLLOWED, MEAN, GradientAnalysis, epoch_column
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.diagnostics import ClassStructure
from gradtrail.core.nn.models import CNNConfig, MLPConfig, Model, ModelConfig, Params
from gradtrail.core.per_example.noise_scale import NoiseScale
from gradtrail.core.privacy_audit.config import PrivacyAuditConfig
from gradtrail.core.profile.benchmark import MachineRates, StepTimes
from gradtrail.core.profile.variants import ProfileConfig, Variant
from gradtrail.core.train.at_once import at_once
from gradtrail.core.train.batch_gradient import Examples
from gradtrail.core.train.config import VARIED, MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk, Engine, compile_engine, make_program, on_device, train
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import (
    AdamConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from gradtrail.core.train.privacy import NOT_PRIVATE, noise_of_measurements
from gradtrail.core.train.schedules import (
    ConstantConfig,
    CosineConfig,
    ExponentialConfig,
    LinearConfig,
    OneCycleConfig,
    PiecewiseConfig,
    WarmupCosineConfig,
)
from gradtrail.core.train.step import RunKeys, TrainState
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.artifacts.privacy import Promise
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.profile.timings import Timings

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (4, 3)  # of images: height and width differ, so that no test passes with them swapped
NUM_CLASSES = 3


def new_compiler(clock: Callable[[], float] | None = None) -> Compiler:
    return Compiler(clock or no_clock)


def no_clock() -> float:
    return 0.0


NO_AUGMENTATION = AugmentationConfig(shift=0.0, rotation=0.0, scale=0.0, shear=0.0, cutout=0)
CNN = CNNConfig(
    channels=(4,), convolutions=1, kernel_size=3, norm="none", groups=2, hidden=(5,), activation="relu", dropout=0.0
)


def train_config(**overrides: Any) -> TrainConfig:
    config = TrainConfig(
        seed=0,
        members=1,
        members_at_once=1,
        vary=VARIED,
        epochs=2,
        batch_size=4,
        accumulation_steps=1,
        shards=1,
        reduction="ordered",
        model="mlp",
        mlp=MLPConfig(hidden=(5,), activation="relu", dropout=0.0),
        cnn=CNN,
        features="none",
        precision="float32",
        loss_scaling=LossScalingConfig(
            initial=2.0**15, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, minimum=1.0
        ),
        remat=False,
        optimizer="sgd",
        sgd=SGDConfig(learning_rate=0.1, momentum=0.9, nesterov=True),
        adam=AdamConfig(learning_rate=0.01, b1=0.9, b2=0.999, eps=1e-8),
        adamw=AdamWConfig(learning_rate=0.01, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.05),
        lion=LionConfig(learning_rate=0.001, b1=0.9, b2=0.99, weight_decay=0.05),
        muon=MuonConfig(learning_rate=0.02, adam_learning_rate=0.01, beta=0.95, weight_decay=0.05),
        schedule_free=ScheduleFreeConfig(
            learning_rate=0.01, warmup_fraction=0.1, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.05
        ),
        schedule="warmup_cosine",
        constant=ConstantConfig(warmup_fraction=0.0),
        cosine=CosineConfig(end_fraction=0.0),
        warmup_cosine=WarmupCosineConfig(warmup_fraction=0.25, end_fraction=0.1),
        linear=LinearConfig(end_fraction=0.1),
        exponential=ExponentialConfig(end_fraction=0.01),
        piecewise=PiecewiseConfig(boundaries=(0.5, 0.75), factor=0.1),
        one_cycle=OneCycleConfig(warmup_fraction=0.3, div_factor=25.0, final_div_factor=1e4),
        clip_norm=1.0,
        average_decay=None,
        label_smoothing=0.1,
        augmentation=NO_AUGMENTATION,
        privacy=NOT_PRIVATE,
        keep_epochs=(0, 1),
        patience=None,
    )
    return dataclasses.replace(config, **overrides)


def audit_config(**overrides: Any) -> AuditConfig:
    config = AuditConfig(
        seed=0,
        quick=False,
        folds=3,
        rounds=2,
        epochs=1,
        batch_size=4,
        learning_rate=0.01,
        weight_decay=0.0,
        channels=(2,),
        hidden=(3,),
        precision="float32",
        noise_rate=0.2,
        num_suspects=3,
    )
    return dataclasses.replace(config, **overrides)


def privacy_audit_config(**overrides: Any) -> PrivacyAuditConfig:
    config = PrivacyAuditConfig(seed=0, trainings=1, canaries="dots", num_canaries=20, guess_share=0.5, confidence=0.95)
    return dataclasses.replace(config, **overrides)


def preprocess_config(**overrides: Any) -> PreprocessConfig:
    config = PreprocessConfig(
        seed=0,
        validation_fraction=0.25,
        subset_fraction=1.0,
        label_noise=0.0,
        corrections=False,
        deformations=1,
        deformation=AugmentationConfig(shift=1.0, rotation=10.0, scale=0.1, shear=5.0, cutout=0),
        shard_mib=None,
    )
    return dataclasses.replace(config, **overrides)


def gradients_config(**overrides: Any) -> GradientsConfig:
    config = GradientsConfig(
        weights="final",
        top_fraction=0.1,
        num_largest=4,
        num_suspects=3,
        num_influenced=2,
        bootstrap_samples=100,
        curvature_iterations=0,
        test_examples=(),
    )
    return dataclasses.replace(config, **overrides)


def profile_config(**overrides: Any) -> ProfileConfig:
    config = ProfileConfig(precisions=("float32",), smallest_batch_size=4, largest_batch_size=4, steps=2, seconds=1.0)
    return dataclasses.replace(config, **overrides)


def optimizer_config(**overrides: Any) -> OptimizerConfig:
    return dataclasses.replace(train_config().optimizer_config(), **overrides)


def model_config(**overrides: Any) -> ModelConfig:
    """A perceptron; `kind="cnn"` or `kind="linear"` alone switches the network."""
    kind = overrides.get("kind", "mlp")
    config = train_config(model=kind).model_config(SHAPE, NUM_CLASSES)
    return dataclasses.replace(config, **overrides)


def initial_params(model: Model, seed: int = 0) -> Params:
    """The initial parameters, drawn in one program: by itself each layer would be compiled."""
    return jax.jit(lambda key: model.init(key=key))(jax.random.key(seed))


def random_split(num_examples: int, *, shape: tuple[int, int] = SHAPE, num_classes: int = NUM_CLASSES) -> Split:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, *shape), dtype=np.uint8)
    labels = rng.integers(0, num_classes, num_examples, dtype=np.int32)
    return split_of(images, labels)


def split_of(images: np.ndarray, labels: np.ndarray, example_id: np.ndarray | None = None) -> Split:
    """A split without noise or corrections; by default its examples are numbered from 0."""
    ids = np.arange(len(labels), dtype=np.int32) if example_id is None else example_id
    same = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), labels)
    return Split(images=images, example_id=ids, **same)


def dataset_info(**overrides: Any) -> DatasetInfo:
    info = DatasetInfo(
        name="digits",
        digest="ab" * 32,
        image_shape=SHAPE,
        num_classes=NUM_CLASSES,
        examples={"train": 10, "validation": 5, "test": 5},
        files={},
    )
    return dataclasses.replace(info, **overrides)


def make_engine(
    config: TrainConfig,
    split: Split,
    *,
    num_classes: int = NUM_CLASSES,
    noise_multiplier: float | None = None,
    members: int = 1,
    every: int | None = None,
) -> tuple[Engine, Examples]:
    """Compile the training of `config` on a split, once; return it with the split on the device.

    Where `every` is given, of so many examples one is followed.
    """
    engine = _compiled(config, len(split), split.images.shape[1:], num_classes, noise_multiplier, members, every)
    return engine, on_device(split.images, split.labels, engine.mesh)


@functools.cache
def _compiled(
    config: TrainConfig,
    num_examples: int,
    shape: tuple[int, int],
    num_classes: int,
    noise_multiplier: float | None,
    members: int,
    every: int | None,
) -> Engine:
    model = Model(config.model_config(shape, num_classes), remat=config.remat)
    noise = noise_of_measurements(config.privacy) if noise_multiplier is None else noise_multiplier
    followed = None if every is None else np.arange(0, num_examples, every)
    program = make_program(config, model, num_examples, jax.local_devices(), noise_multiplier=noise, followed=followed)
    return compile_engine(program if members == 1 else at_once(program, members), compiler=new_compiler())


def seed_keys(seed: int) -> Array:
    """The keys of a training by one seed."""
    return keys_of(MemberSeeds.from_one(seed))


def private_config(*, privacy: Mapping[str, Any] | None = None, **overrides: Any) -> TrainConfig:
    """A private training with a given noise multiplier; `privacy` overrides fields of its section."""
    fields = {"enabled": True, "epsilon": None, "noise_multiplier": 1.0, **(privacy or {})}
    return train_config(privacy=dataclasses.replace(NOT_PRIVATE, **fields), **overrides)


def run_keys(seed: int) -> RunKeys:
    """The keys in the state of such a training, or like them."""
    key = jax.random.key(seed)
    return RunKeys(order=key, augmentation=key, dropout=key, noise=None)


def run_training(
    engine: Engine, examples: Examples, *, seed: int = 0, steps_per_call: int = 1000, state: TrainState | None = None
) -> list[Chunk]:
    """Train to the end; return all chunks as copies on the host."""
    state = engine.init(seed_keys(seed)) if state is None else state
    return [copied(chunk) for chunk in train(engine, state, examples, steps_per_call=steps_per_call)]


def copied(chunk: Chunk) -> Chunk:
    """Return a chunk whose arrays the next one does not overwrite."""
    copies = jax.tree.map(lambda leaf: leaf.copy(), (chunk.state, chunk.records))
    return dataclasses.replace(chunk, state=copies[0], records=copies[1])


def gradient_analysis(sizes: Mapping[str, int], *, num_classes: int = NUM_CLASSES) -> GradientAnalysis:
    """An analysis of random splits of these sizes, at epochs 0 and 2, its figures drawn at random."""
    rng = np.random.default_rng(0)
    names = ("el2n", "entropy", "grad_norm", "grad_norm_layers/0", "input_norm", "loss", "margin", "probability")
    names += ("self_influence", "alignment", "class_alignment")
    names += tuple(epoch_column(name, epoch) for name in FOLLOWED for epoch in (0, 2))
    names += tuple(f"{name}{MEAN}" for name in FOLLOWED)
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


def a_promise(**changes: Any) -> Promise:
    promise = Promise(
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
    counted = {"jaxpr_equations": 10, "hlo_instructions": 30, "hlo_fusions": 4}
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
        | {"flops_per_second": 2e9, "bytes_per_second": 1e9, "arithmetic_intensity": 2.0}
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
