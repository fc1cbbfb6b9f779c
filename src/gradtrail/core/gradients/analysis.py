"""The analysis of per-example gradients of a trained model, at all of its kept weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.gradients.chunks import ChunkGradients, chunk_gradients
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.gradients.diagnostics import ClassStructure, checkpoint_weights, class_structure, largest_eigenvalue
from gradtrail.core.gradients.passes import GradientPasses, Pass, mean_hessian_product
from gradtrail.core.gradients.scores import largest
from gradtrail.core.nn.models import HostParams, Params
from gradtrail.core.noise_scale import NoiseScale, from_chunks

Scores = dict[str, np.ndarray]
EPOCH_SCORES = ("grad_norm", "el2n", "loss", "probability", "margin")  # scores reported for every kept epoch
MEAN = "_mean"  # suffix of a score's mean over the kept epochs after training began
_SEED = 0  # seed of the bootstrap and of the power iteration


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The kept weights of a training, and the learning rates between them."""

    params: Mapping[int, Params | HostParams]  # epoch → parameters; 0 is before training
    scored: int  # epoch whose scores are all reported, one of `params`
    learning_rates: Float[np.ndarray, " steps"]  # learning rate of every step
    steps_per_epoch: int  # number of steps in each epoch
    batch_size: int  # number of examples of each step but the last of an epoch

    @functools.cached_property
    def weights(self) -> dict[int, float]:
        """Weight of each kept epoch in sums over the training, see `checkpoint_weights`."""
        epochs = sorted(self.params)
        weights = checkpoint_weights(epochs, self.learning_rates, self.steps_per_epoch)
        return dict(zip(epochs, weights.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class GradientAnalysis:
    """Results of the analysis."""

    scores: dict[str, Scores]  # split → score → a value for each example, float32
    # epoch → gradient noise scale of the training split; empty if that has no example
    noise_scales: dict[int, NoiseScale]
    classes: ClassStructure  # similarity of the classes' gradients on the training split, at the scored epoch
    # positions in the test split of the examples whose influences were computed
    influenced: Int[np.ndarray, " influenced"]
    # influence of each training example on each of those, float32; positive if it lowered the loss
    influence: Float[np.ndarray, "examples influenced"]
    # largest eigenvalue of the Hessian of the mean training loss at the scored epoch; None if it is not configured
    curvature: float | None


def epoch_column(name: str, epoch: int) -> str:
    """Return the column name of a score at an epoch, such as `el2n_epoch_005`."""
    return f"{name}_epoch_{epoch:03d}"


def num_influenced(config: GradientsConfig, num_test_examples: int) -> int:
    """Return the number of test examples whose influences are computed."""
    return min(len(config.test_examples) or config.num_influenced, num_test_examples)


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

    Without a training example there are no noise scales, influences, classes and cosines.

    Args:
        passes: passes compiled for the model and for `num_influenced` examples.
        splits: splits by name, with `train` and `test`.
        config: chosen test examples, number of bootstrap samples and of iterations.
        advance: called with the number of examples that a pass has processed, `num_visits` in all, and with 0 and a
            `message` after each epoch.

    Raises:
        ConfigError: one line; an example of `config.test_examples` is not in the test split.
    """
    train, test = splits["train"], splits["test"]
    by_epoch: dict[int, dict[str, Scores]] = {}
    noise_scales: dict[int, NoiseScale] = {}
    influence = np.zeros((len(train), num_influenced(config, len(test))))

    def score(epoch: int) -> dict[str, Scores]:
        params = passes.place(trajectory.params[epoch])
        by_split = {
            name: passes.score(params, part.images, part.labels, advance=advance)
            for name, part in splits.items()
            if len(part)
        }
        empty = {name: values[:0] for name, values in next(iter(by_split.values())).items()}
        return {name: by_split.get(name, empty) for name in splits}

    classes = ClassStructure.unknown(num_classes)
    aligned = {name: _cosines(np.full((len(part), 2), np.nan, np.float32)) for name, part in splits.items()}
    by_epoch[trajectory.scored] = score(trajectory.scored)
    influenced = _choose(config, test, by_epoch[trajectory.scored]["test"])
    for epoch, on_host in sorted(trajectory.params.items()):
        params = passes.place(on_host)
        if epoch not in by_epoch:
            by_epoch[epoch] = score(epoch)
        if not len(train):
            continue
        chunks = chunk_gradients(passes, params, train, num_classes, advance=advance)
        squares = chunks.squares(by_epoch[epoch]["train"]["grad_norm"])
        products = chunks.products()
        noise_scales[epoch] = from_chunks(
            products, squares, chunks.sizes, chunks.classes, samples=config.bootstrap_samples, seed=_SEED
        )
        test_signals = passes.signals(params, test.images[influenced], test.labels[influenced])
        products_with_test = passes.products((params, test_signals), train.images, train.labels, advance=advance)[
            "products"
        ]
        influence += trajectory.weights[epoch] * products_with_test.astype(np.float64)
        if epoch == trajectory.scored:
            classes = _class_structure(chunks, products, squares, num_classes)
            aligned = _align(passes, params, splits, chunks, by_epoch[epoch], num_classes, advance)
        advance(0, message=f"epoch {epoch}")
    scores = {name: _split_scores(by_epoch, trajectory, name) | aligned[name] for name in splits}
    return GradientAnalysis(
        scores=scores,
        noise_scales=noise_scales,
        classes=classes,
        influenced=influenced,
        influence=influence.astype(np.float32),
        curvature=_curvature(
            passes.hessian, passes.place(trajectory.params[trajectory.scored]), train, config.curvature_iterations
        ),
    )


def num_visits(trajectory: Trajectory, splits: Mapping[str, Split]) -> int:
    """Return the sum of the numbers that `analyze` reports to `advance`."""
    everywhere, in_training, epochs = sum(map(len, splits.values())), len(splits["train"]), len(trajectory.params)
    aligned = everywhere if in_training else 0
    return epochs * everywhere + aligned + 2 * epochs * in_training


def _choose(config: GradientsConfig, test: Split, scores: Scores) -> Int[np.ndarray, " influenced"]:
    """Return the positions of the chosen test examples, or of those with the largest loss."""
    if not config.test_examples:
        return largest(scores["loss"], num_influenced(config, len(test)))
    positions = {int(name): position for position, name in enumerate(test.example_id)}
    for name in config.test_examples:
        if name not in positions:
            raise ConfigError(
                f"gradients.test_examples: no example {name} in the test split, which has {len(test)} "
                f"of {test.example_id.min()} to {test.example_id.max()}"
            )
    return np.array([positions[name] for name in config.test_examples])


def _split_scores(by_epoch: Mapping[int, Mapping[str, Scores]], trajectory: Trajectory, split: str) -> Scores:
    """Return all scores of the scored epoch, `EPOCH_SCORES` of every epoch with their means, and self-influence."""
    split_by_epoch = {epoch: scores[split] for epoch, scores in sorted(by_epoch.items())}
    trained = [epoch for epoch in split_by_epoch if epoch > 0] or list(split_by_epoch)
    columns = dict(split_by_epoch[trajectory.scored])
    for name in EPOCH_SCORES:
        columns |= {epoch_column(name, epoch): scores[name] for epoch, scores in split_by_epoch.items()}
        total = np.sum([split_by_epoch[epoch][name] for epoch in trained], axis=0, dtype=np.float64)
        columns[f"{name}{MEAN}"] = np.asarray(total / len(trained), np.float32)
    squares = [
        trajectory.weights[epoch] * scores["grad_norm"].astype(np.float64) ** 2
        for epoch, scores in split_by_epoch.items()
    ]
    columns["self_influence"] = np.sum(squares, axis=0).astype(np.float32)
    return columns


def _curvature(hessian: Pass | None, params: Params | HostParams, train: Split, iterations: int) -> float | None:
    if hessian is None or not iterations or not len(train):
        return None
    product = functools.partial(mean_hessian_product, hessian, params, split=train)
    return largest_eigenvalue(product, params, iterations, seed=_SEED)


def _class_structure(
    chunks: ChunkGradients, products: np.ndarray, squares: np.ndarray, num_classes: int
) -> ClassStructure:
    member = np.equal.outer(np.arange(num_classes), chunks.classes).astype(np.float64)
    class_products = np.einsum("ak,kl->al", member, products)  # no `@`: the order of a BLAS varies
    between = np.einsum("al,bl->ab", class_products, member)
    squares, sizes = (np.einsum("ak,k->a", member, values) for values in (squares, chunks.sizes))
    return class_structure(between, squares, sizes.astype(np.int64))


def _align(
    passes: GradientPasses,
    params: Params | HostParams,
    splits: Mapping[str, Split],
    chunks: ChunkGradients,
    scores: Mapping[str, Scores],
    num_classes: int,
    advance: Callable[..., object],
) -> dict[str, Scores]:
    """Return the cosine of each example's gradient with the mean training gradient, of all and of its class."""
    dots_by_split = {name: np.zeros((len(split), 2), np.float32) for name, split in splits.items()}
    total = _unit(chunks.total())
    for label in range(num_classes):
        directions = passes.place(_unraveled(np.stack([total, _unit(chunks.class_gradient(label))]), params))
        for name, split in splits.items():
            rows = np.flatnonzero(split.labels == label)
            if len(rows):
                whole = (params, directions)
                dots_by_split[name][rows] = passes.dots(whole, split.images[rows], split.labels[rows], advance=advance)[
                    "dots"
                ]
    tiny = np.finfo(np.float32).tiny
    cosines = {
        name: dots / np.maximum(scores[name]["grad_norm"], tiny)[:, None] for name, dots in dots_by_split.items()
    }
    return {name: _cosines(values) for name, values in cosines.items()}


def _cosines(values: Float[np.ndarray, "examples 2"]) -> Scores:
    return {"alignment": values[:, 0], "class_alignment": values[:, 1]}


def _unraveled(vectors: Float[np.ndarray, "vectors parameters"], like: Params | HostParams) -> HostParams:
    """Return vectors as parameters with a leading axis; on the host, where nothing is compiled for it."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vectors, np.cumsum([leaf.size for leaf in leaves])[:-1], axis=1)
    shaped = [part.reshape(-1, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _unit(vector: np.ndarray) -> Float[np.ndarray, " parameters"]:
    norm = np.sqrt(np.sum(np.square(vector, dtype=np.float64)))  # `np.linalg.norm` takes a BLAS, whose order varies
    return (vector / norm if norm > 0 else vector).astype(np.float32)
