"""The analysis of per-example gradients of a trained model, at all of its kept weights.

What a training example does to the answers of the network is out of scope: see `what_if`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import numpy as np
from jaxtyping import Float

from gradtrail.core.config import Bounds, GallerySize, PositiveFraction, config
from gradtrail.core.data import Split
from gradtrail.core.gradients.chunks import ChunkGradients, ClassStructure, chunk_gradients, class_structure
from gradtrail.core.gradients.curvature import sharpness
from gradtrail.core.gradients.passes import GradientPasses
from gradtrail.core.nn.models import HostParams, Params, WeightsKind
from gradtrail.core.noise_scale import NoiseScale, from_chunks

Scores = dict[str, np.ndarray]
EPOCH_SCORES = ("grad_norm", "el2n", "loss", "probability", "margin")  # scores reported for every kept epoch
MEAN = "_mean"  # suffix of a score's mean over the kept epochs after training began
_SEED = 0  # seed of the bootstrap

# `gradients.examples: auto` analyzes all training examples for this number of FLOPs, half a minute on two cores, or
# for those of this many passes over all, whichever is more; otherwise a sample of not fewer examples than this. A pass
# takes about two epochs of the training of a convolutional network.
_AFFORDABLE_FLOPS = 2e12
_AFFORDABLE_PASSES = 2
_SMALLEST_SAMPLE = 5_000


@config
class GradientsConfig:
    """The section `gradients` of `params.yaml`."""

    weights: WeightsKind  # weights of the last epoch, or of the one with the best validation accuracy
    examples: Literal["auto", "all"]  # training examples to analyze: `auto` samples them for a costly network
    top_fraction: PositiveFraction  # share of a split that counts as the largest gradients
    num_largest: GallerySize  # number of images in the gallery of the largest gradients
    num_suspects: GallerySize  # number of images in each gallery of suspected label errors
    # number of bootstrap samples for the interval of the noise scale
    bootstrap_samples: Annotated[int, Bounds(at_least=100, at_most=100_000)]


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The kept weights of a training."""

    params: Mapping[int, Params | HostParams]  # epoch → parameters; 0 is before training
    scored: int  # epoch whose scores are all reported, one of `params`
    batch_size: int  # number of examples of each step but the last of an epoch


@dataclass(frozen=True, kw_only=True)
class GradientAnalysis:
    """Results of the analysis."""

    scores: dict[str, Scores]  # split with examples → score → a value for each example, float32
    noise_scales: dict[int, NoiseScale]  # epoch → gradient noise scale of the training split; empty without examples
    sharpness: dict[int, float]  # epoch → largest eigenvalue of the Hessian of the training loss; likewise
    classes: ClassStructure  # similarity of the classes' gradients on the training split, at the scored epoch


def epoch_column(name: str, epoch: int) -> str:
    """Return the column name of a score at an epoch, such as `el2n_epoch_005`."""
    return f"{name}_epoch_{epoch:03d}"


def num_visits(trajectory: Trajectory, splits: Mapping[str, Split]) -> int:
    """Return the sum of the numbers that `analyze` reports to `advance`."""
    everywhere = sum(map(len, splits.values()))
    return everywhere * (len(trajectory.params) + bool(len(splits["train"])))


def analysis_flops(passes: GradientPasses, num_epochs: int, num_train: int, num_others: int) -> float:
    """Return the static FLOPs of `analyze` for numbers of kept epochs, training and other examples; see `Pass.work`."""
    each_epoch = num_others * passes.score.work + num_train * passes.sums.work
    return num_epochs * each_epoch + (num_train + num_others) * passes.dots.work


def affordable_examples(passes: GradientPasses, num_epochs: int, num_train: int, num_others: int) -> int:
    """Return the number of training examples to analyze: all, or for a costly network as many as fit into a budget.

    It follows from static costs, never from times, so that it is the same on every run. It is rounded down to hundreds.
    """
    budget = max(_AFFORDABLE_FLOPS, _AFFORDABLE_PASSES * num_train * passes.sums.work)
    fixed, everything = (analysis_flops(passes, num_epochs, count, num_others) for count in (0, num_train))
    if everything <= budget:
        return num_train
    affordable = int((budget - fixed) / (everything - fixed) * num_train)
    return min(num_train, max(_SMALLEST_SAMPLE, affordable // 100 * 100))


def analyze(
    passes: GradientPasses,
    trajectory: Trajectory,
    splits: Mapping[str, Split],
    config: GradientsConfig,
    num_classes: int,
    *,
    advance: Callable[..., object] = lambda *_, **__: None,
) -> GradientAnalysis:
    """Run all passes over the splits at each kept epoch.

    Without a training example there are no noise scales, classes and cosines.

    Args:
        passes: passes compiled for the model.
        splits: splits by name, with `train`.
        config: number of bootstrap samples.
        advance: called with the number of examples that a pass has processed, `num_visits` in all, and with 0 and a
            `message` after each epoch.
    """
    train = splits["train"]
    splits = {name: split for name, split in splits.items() if len(split)}

    by_epoch: dict[int, dict[str, Scores]] = {}
    noise_scales: dict[int, NoiseScale] = {}
    eigenvalues: dict[int, float] = {}
    classes = ClassStructure.unknown(num_classes)
    cosines = {name: np.full((len(split), 2), np.nan, np.float32) for name, split in splits.items()}
    for epoch, on_host in sorted(trajectory.params.items()):
        params = jax.device_put(on_host)
        by_epoch[epoch] = {
            name: passes.score(params, split.images, split.labels, advance=advance)
            for name, split in splits.items()
            if name != "train"
        }
        if not len(train):
            continue

        # Noise scale, from sums of gradients over chunks of a class
        chunks, by_epoch[epoch]["train"] = chunk_gradients(passes.sums, params, train, num_classes, advance=advance)
        squares = chunks.squares(by_epoch[epoch]["train"]["grad_norm"])
        products = chunks.products()
        noise_scales[epoch] = from_chunks(
            products, squares, chunks.sizes, chunks.classes, samples=config.bootstrap_samples, seed=_SEED
        )

        eigenvalues[epoch] = sharpness(passes.hessian, params, train)

        if epoch == trajectory.scored:
            classes = class_structure(products, squares, chunks, num_classes)
            cosines = _align(passes, params, splits, chunks, by_epoch[epoch], advance)
        advance(0, message=f"epoch {epoch}")

    return GradientAnalysis(
        scores={
            name: _split_scores(by_epoch, trajectory, name)
            | {"alignment": cosines[name][:, 0], "class_alignment": cosines[name][:, 1]}
            for name in splits
        },
        noise_scales=noise_scales,
        sharpness=eigenvalues,
        classes=classes,
    )


def _split_scores(by_epoch: Mapping[int, Mapping[str, Scores]], trajectory: Trajectory, split: str) -> Scores:
    """Return all scores of the scored epoch, and `EPOCH_SCORES` of every epoch with their means."""
    split_by_epoch = {epoch: scores[split] for epoch, scores in sorted(by_epoch.items())}
    trained = [epoch for epoch in split_by_epoch if epoch > 0] or list(split_by_epoch)
    columns = dict(split_by_epoch[trajectory.scored])
    for name in EPOCH_SCORES:
        columns |= {epoch_column(name, epoch): scores[name] for epoch, scores in split_by_epoch.items()}
        total = np.sum([split_by_epoch[epoch][name] for epoch in trained], axis=0, dtype=np.float64)
        columns[f"{name}{MEAN}"] = np.asarray(total / len(trained), np.float32)
    return columns


def _align(
    passes: GradientPasses,
    params: Params | HostParams,
    splits: Mapping[str, Split],
    chunks: ChunkGradients,
    scores: Mapping[str, Scores],
    advance: Callable[..., object],
) -> dict[str, Float[np.ndarray, "examples 2"]]:
    """Return the cosines of each example's gradient with the mean training gradient, of all and of its class."""
    dots = {name: np.zeros((len(split), 2), np.float32) for name, split in splits.items()}
    mean = _unit(np.sum(chunks.sums, axis=0))
    for label in np.unique(np.concatenate([split.labels for split in splits.values()])):
        class_mean = _unit(np.sum(chunks.sums[chunks.classes == label], axis=0))
        directions = jax.device_put(_unraveled(np.stack([mean, class_mean]), params))
        for name, split in splits.items():
            rows = np.flatnonzero(split.labels == label)
            if len(rows):
                results = passes.dots(params, split.images[rows], split.labels[rows], directions, advance=advance)
                dots[name][rows] = results["dots"]
    tiny = np.finfo(np.float32).tiny
    return {name: dots[name] / np.maximum(scores[name]["grad_norm"], tiny)[:, None] for name in splits}


def _unraveled(vectors: Float[np.ndarray, "vectors parameters"], like: Params | HostParams) -> HostParams:
    """Return vectors as parameters with a leading axis; on the host, where nothing is compiled for it."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vectors, np.cumsum([leaf.size for leaf in leaves])[:-1], axis=1)
    shaped = [part.reshape(-1, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _unit(vector: np.ndarray) -> Float[np.ndarray, " parameters"]:
    norm = np.sqrt(np.sum(np.square(vector, dtype=np.float64)))  # `np.linalg.norm` takes a BLAS, whose order varies
    return (vector / norm if norm > 0 else vector).astype(np.float32)
