"""Small valid instances of what the code works on; a test names only what it is about."""

import contextlib
import dataclasses
import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from exports import random_params
from jaxtyping import Array
from PIL import Image
from sklearn.datasets import load_sample_images

from gradtrail.core.audit.networks import AuditConfig
from gradtrail.core.data import PreprocessConfig, Split
from gradtrail.core.gradients.analysis import GradientsConfig
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.mlp import MLP, Linear
from gradtrail.core.nn.models import Model, ModelConfig, Network, Params
from gradtrail.core.nn.own import Own
from gradtrail.core.nn.resnet import ResNet
from gradtrail.core.privacy_audit import PrivacyAuditConfig
from gradtrail.core.profile.benchmark import ProfileConfig
from gradtrail.core.train import schedules
from gradtrail.core.train.changes import NO_CHANGES, changed_labels, weight_changes
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk, CompiledTraining, TrainingFunctions, on_device
from gradtrail.core.train.optimizers import SGD, Adam, AdamW, Lion, Muon, Optimizer, RMSprop
from gradtrail.core.train.plain import PLAIN
from gradtrail.core.train.privacy import NOT_PRIVATE, placeholder_noise
from gradtrail.core.train.schedules import (
    Constant,
    Cosine,
    Exponential,
    OneCycle,
    Piecewise,
    Schedule,
    WarmupCosine,
    WarmupInverseSqrt,
)
from gradtrail.core.train.step import RunKeys
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.data.data_files import DatasetInfo

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (4, 3)  # of images: height and width differ, so that no test passes with them swapped
NUM_CLASSES = 3


def new_compiler(clock: Callable[[], float] | None = None) -> Compiler:
    return Compiler(clock or (lambda: 0.0))


SMALL_CNN = CNN(
    channels=(4,), convolutions=1, kernel_size=3, norm="none", groups=2, hidden=(5,), activation="relu", dropout=0.0
)


SMALL_RESNET = ResNet(patch=2, channels=(4, 6), blocks=1, groups=2, activation="relu", dropout=0.0)


def own_network(file: str, **fields: Any) -> Own:
    """A network of a file in `pipeline/networks`."""
    with contextlib.chdir(ROOT):
        return Own(file=file, config=Own.config_class(file)(**fields))


SMALL_MIXER = own_network("mixer", patch_size=1, width=4, blocks=1, hidden=(3, 5))

# The configs that `train_config` uses for a kind that is given by its name
NETWORKS: dict[str, Network] = {
    "linear": Linear(),
    "mlp": MLP(hidden=(5,), activation="relu", dropout=0.0),
    "cnn": SMALL_CNN,
    "resnet": SMALL_RESNET,
}
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(learning_rate=0.1, momentum=0.9, nesterov=True),
    "rmsprop": RMSprop(learning_rate=0.01, decay=0.9, eps=1e-8, momentum=0.0),
    "adam": Adam(learning_rate=0.01, b1=0.9, b2=0.999, eps=1e-8),
    "adamw": AdamW(learning_rate=0.01, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.05),
    "lion": Lion(learning_rate=0.001, b1=0.9, b2=0.99, weight_decay=0.05),
    "muon": Muon(learning_rate=0.02, adam_learning_rate=0.01, beta=0.95, weight_decay=0.05),
}
SCHEDULES: dict[str, Schedule] = {
    "constant": Constant(warmup_fraction=0.0),
    "cosine": Cosine(end_fraction=0.0),
    "warmup_cosine": WarmupCosine(warmup_fraction=0.25, end_fraction=0.1),
    "warmup_inverse_sqrt": WarmupInverseSqrt(warmup_fraction=0.25),
    "linear": schedules.Linear(end_fraction=0.1),
    "exponential": Exponential(end_fraction=0.01),
    "piecewise": Piecewise(boundaries=(0.5, 0.75), factor=0.1),
    "one_cycle": OneCycle(warmup_fraction=0.3, div_factor=25.0, final_div_factor=1e4),
}


def train_config(**overrides: Any) -> TrainConfig:
    """A config of a small training; `model`, `optimizer` and `schedule` may be names of kinds."""
    config = dataclasses.replace(
        PLAIN,
        epochs=2,
        batch_size=4,
        model=NETWORKS["mlp"],
        optimizer=OPTIMIZERS["sgd"],
        schedule=SCHEDULES["warmup_cosine"],
        clip_norm=1.0,
        loss=CrossEntropy(label_smoothing=0.1),
        keep_epochs=(0, 1),
    )
    kinds: dict[str, Any] = {"model": NETWORKS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}
    for field in kinds.keys() & overrides.keys():
        if isinstance(name := overrides[field], str):
            overrides[field] = kinds[field][name]
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
    config = PrivacyAuditConfig(seed=0, trainings=1, num_canaries=20, guess_share=0.5, confidence=0.95)
    return dataclasses.replace(config, **overrides)


def preprocess_config(**overrides: Any) -> PreprocessConfig:
    config = PreprocessConfig(
        seed=0,
        validation_fraction=0.25,
        subset_fraction=1.0,
        label_noise=0.0,
        corrections=False,
    )
    return dataclasses.replace(config, **overrides)


def gradients_config(**overrides: Any) -> GradientsConfig:
    config = GradientsConfig(
        weights="final",
        examples="auto",
        top_fraction=0.1,
        num_largest=4,
        num_suspects=3,
        bootstrap_samples=100,
    )
    return dataclasses.replace(config, **overrides)


def profile_config(**overrides: Any) -> ProfileConfig:
    config = ProfileConfig(precisions=("float32",), smallest_batch_size=4, largest_batch_size=4, steps=2, seconds=1.0)
    return dataclasses.replace(config, **overrides)


def model_config(network: Network | str = "mlp", **overrides: Any) -> ModelConfig:
    config = train_config(model=network).model_config(SHAPE, NUM_CLASSES)
    return dataclasses.replace(config, **overrides)


def params_on_device(model: Model, seed: int = 0) -> Params:
    """Parameters as those of `random_params`, for functions that are not compiled."""
    return jax.device_put(random_params(model, seed))


def random_split(num_examples: int, *, shape: tuple[int, ...] = SHAPE, num_classes: int = NUM_CLASSES) -> Split:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, *shape), dtype=np.uint8)
    labels = rng.integers(0, num_classes, num_examples, dtype=np.int32)
    return split_of(images, labels)


def color_split(num_examples: int, *, shape: tuple[int, int] = SHAPE, seed: int = 0) -> Split:
    """Patches of scikit-learn's two photographs in color: of the sky and of the temple of one, and of the other."""
    china, flower = load_sample_images().images
    photographs = (china[: len(china) // 2], china[len(china) // 2 :], flower)
    rng, labels = np.random.default_rng(seed), np.arange(num_examples, dtype=np.int32) % NUM_CLASSES
    images = np.zeros((num_examples, *shape, 3), np.uint8)
    for image, label in zip(images, labels, strict=True):
        patches = np.lib.stride_tricks.sliding_window_view(photographs[label], shape, axis=(0, 1))
        image[:] = np.moveaxis(patches[rng.integers(len(patches)), rng.integers(patches.shape[1])], 0, -1)
    return split_of(images, labels)


def split_of(images: np.ndarray, labels: np.ndarray, example_id: np.ndarray | None = None) -> Split:
    """A split without noise or corrections; by default its examples are numbered from 0."""
    ids = np.arange(len(labels), dtype=np.int32) if example_id is None else example_id
    same = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), labels)
    return Split(images=images, example_id=ids, **same)


def changed_weights(split: Split, **changes: Any) -> np.ndarray:
    """The changes of the weights of a training split by these fields of `ChangesConfig`."""
    config = dataclasses.replace(NO_CHANGES, **changes)
    labels = changed_labels(config, split.labels, split.example_id, NUM_CLASSES)
    return weight_changes(split.labels, labels, NUM_CLASSES)


def image_file(pixels: np.ndarray, kind: str = "png") -> bytes:
    """Return the bytes of an image file."""
    Image.fromarray(pixels).save(file := io.BytesIO(), kind)
    return file.getvalue()


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
) -> tuple[CompiledTraining, Examples]:
    """Compile the training of `config` on a split, once; return it with the split on the device."""
    engine = _compiled(config, len(split), split.images.shape[1:], num_classes, noise_multiplier)
    return engine, on_device(split.images, split.labels, engine.mesh)


@functools.cache
def _compiled(
    config: TrainConfig,
    num_examples: int,
    shape: tuple[int, ...],
    num_classes: int,
    noise_multiplier: float | None,
) -> CompiledTraining:
    model = Model(config.model_config(shape, num_classes), remat=config.remat)
    noise = placeholder_noise(config.privacy) if noise_multiplier is None else noise_multiplier
    return TrainingFunctions(config, model, num_examples, jax.local_devices(), noise).compile(new_compiler())


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
    engine: CompiledTraining, examples: Examples, *, seed: int = 0, steps_per_call: int = 1000, state: Any = None
) -> list[Chunk]:
    """Train to the end; return all chunks as copies on the host."""
    state = engine.init(seed_keys(seed)) if state is None else state
    return [copied(chunk) for chunk in engine.train(state, examples, steps_per_call=steps_per_call)]


def copied(chunk: Chunk) -> Chunk:
    """Return a chunk whose arrays the next one does not overwrite."""

    def copy(leaf: Array) -> Array:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf.copy() if is_key else jax.device_put(np.array(leaf))  # else a program for each shape

    copies = jax.tree.map(copy, (chunk.state, chunk.records))
    return dataclasses.replace(chunk, state=copies[0], records=copies[1])


def cases(every: Iterable[Any], *, fast: Collection[Any]) -> list[Any]:
    """Return every case, in its order; those that are not in `fast` are slow. A tuple is a value for each argument."""
    every = list(every)
    assert all(case in every for case in fast)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in fast else pytest.mark.slow)
        for case in every
    ]


def run_on_devices(script: str, count: int) -> str:
    """Run Python code in a process with so many CPU devices, compiled fast; return what it prints."""
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "support_code")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
