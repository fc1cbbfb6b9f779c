"""The analysis of a small training against `vmap(grad)` at each of its kept weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factories import (
    NUM_CLASSES,
    gradients_config,
    model_config,
    new_compiler,
    params_on_device,
    random_split,
    split_of,
)
from gradient_oracles import per_example_grads

from gradtrail.core.data import Split
from gradtrail.core.gradients import analysis as gradient_analysis
from gradtrail.core.gradients import chunks as gradient_chunks
from gradtrail.core.gradients import passes as gradient_passes
from gradtrail.core.gradients.analysis import (
    GradientAnalysis,
    Trajectory,
    affordable_examples,
    analysis_flops,
    analyze,
    epoch_column,
    num_visits,
)
from gradtrail.core.gradients.passes import GradientPasses, compile_passes
from gradtrail.core.nn import losses
from gradtrail.core.nn.losses import CrossEntropy
from gradtrail.core.nn.models import Model, Params, num_parameters

MODEL = Model(model_config())
LOSS = CrossEntropy(label_smoothing=0.1)


def split(number: int, *, seed: int) -> Split:
    rng = np.random.default_rng(seed)
    whole = random_split(40)
    rows = rng.choice(40, number, replace=False)
    ids = rng.permutation(1000)[:number].astype(np.int32)
    return split_of(whole.images[rows], whole.labels[rows], ids)


SPLITS = {"train": split(23, seed=1), "validation": split(5, seed=2), "test": split(11, seed=3)}
PARAMS = {epoch: params_on_device(MODEL, epoch) for epoch in (0, 1, 4)}
TRAJECTORY = Trajectory(params=PARAMS, scored=4, batch_size=8)


@functools.cache
def passes(largest: int = 16) -> GradientPasses:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_passes, "_LARGEST_BATCH", {"cpu": largest, "gpu": largest})
        return compile_passes(MODEL, LOSS, compiler=new_compiler())


compiled_grads = jax.jit(functools.partial(per_example_grads, MODEL, loss=LOSS))
VISITS: list[int] = []
SAID: list[str] = []


def advance(visits: int, message: str = "") -> None:
    VISITS.append(visits)
    SAID.extend([message] if message else [])


@pytest.fixture(scope="module")
def analysis() -> GradientAnalysis:
    return analyze(passes(), TRAJECTORY, SPLITS, gradients_config(), NUM_CLASSES, advance=advance)


@functools.cache
def gradients(epoch: int, name: str) -> np.ndarray:
    """The gradient of each example of a split, float64, by the definition."""
    part = SPLITS[name]
    item = compiled_grads(PARAMS[epoch], jnp.asarray(part.images), jnp.asarray(part.labels))
    return np.concatenate([np.asarray(leaf, np.float64).reshape(len(part), -1) for leaf in jax.tree.leaves(item)], 1)


def close(actual: np.ndarray, expected: np.ndarray, scale: float = 1e-5) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=scale * np.abs(expected).max())


@pytest.mark.parametrize("name", SPLITS)
def test_norms_are_kept_of_every_epoch_and_averaged_over_the_training(name: str, analysis: GradientAnalysis) -> None:
    norms = {epoch: np.linalg.norm(gradients(epoch, name), axis=1) for epoch in PARAMS}
    columns = analysis.scores[name]
    for epoch, expected in norms.items():
        close(columns[epoch_column("grad_norm", epoch)], expected)
    close(columns["grad_norm"], norms[4])
    close(columns["grad_norm_mean"], (norms[1] + norms[4]) / 2)


def test_scores_are_those_of_the_losses(analysis: GradientAnalysis) -> None:
    @jax.jit
    def values(params: Params, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        logits = MODEL.apply(params, images)
        loss, probability = LOSS.per_example(logits, labels), losses.label_probability(logits, labels)
        return {"loss": loss, "probability": probability, "entropy": losses.entropy(logits)} | {"logits": logits}

    part, columns = SPLITS["test"], analysis.scores["test"]
    expected = jax.device_get(values(PARAMS[4], part.images, part.labels))
    np.testing.assert_array_equal(columns["predicted"], np.argmax(expected.pop("logits"), axis=1))
    for name, column in expected.items():
        close(columns[name], column)


@pytest.mark.parametrize("name", SPLITS)
def test_alignment_is_the_cosine_with_the_mean_gradient_of_all_and_of_the_class(
    name: str, analysis: GradientAnalysis
) -> None:
    train, item = gradients(4, "train"), gradients(4, name)
    means = {label: train[SPLITS["train"].labels == label].mean(axis=0) for label in range(NUM_CLASSES)}
    norms = np.linalg.norm(item, axis=1)
    close(analysis.scores[name]["alignment"], item @ train.mean(axis=0) / np.linalg.norm(train.mean(axis=0)) / norms)
    own_result = np.stack([means[label] for label in SPLITS[name].labels])
    expected = np.sum(item * own_result, axis=1) / np.linalg.norm(own_result, axis=1) / norms
    close(analysis.scores[name]["class_alignment"], expected)


def test_the_noise_scale_goes_over_all_pairs_of_training_examples(analysis: GradientAnalysis) -> None:
    for epoch in PARAMS:
        products = gradients(epoch, "train") @ gradients(epoch, "train").T
        squared_norm = (products.sum() - np.trace(products)) / (23 * 22)
        assert analysis.noise_scales[epoch].squared_norm == pytest.approx(squared_norm, rel=1e-4)
        assert analysis.noise_scales[epoch].trace == pytest.approx(np.trace(products) / 23 - squared_norm, rel=1e-4)


def test_class_structure_is_that_of_the_scored_weights(analysis: GradientAnalysis) -> None:
    labels, item = SPLITS["train"].labels, gradients(4, "train")
    sums = np.stack([item[labels == label].sum(axis=0) for label in range(NUM_CLASSES)])
    norms = np.linalg.norm(sums, axis=1)
    np.testing.assert_allclose(analysis.classes.cosine, sums @ sums.T / np.outer(norms, norms), atol=1e-5)
    assert analysis.classes.share.sum() == pytest.approx(1)


def test_every_pass_reports_the_examples_it_has_done(analysis: GradientAnalysis) -> None:
    assert sum(VISITS) == num_visits(TRAJECTORY, SPLITS)
    assert [f"epoch {epoch}" for epoch in sorted(TRAJECTORY.params)] == SAID


def test_size_of_the_microbatch_does_not_matter(analysis: GradientAnalysis) -> None:
    narrow = passes(4)
    assert (narrow.score.batch_size, passes().score.batch_size) == (4, 16)
    again = analyze(narrow, TRAJECTORY, SPLITS, gradients_config(), NUM_CLASSES)
    for name, columns in analysis.scores.items():
        for column, values in columns.items():
            np.testing.assert_allclose(again.scores[name][column], values, rtol=1e-4, atol=1e-6, err_msg=column)


@pytest.mark.parametrize(("floats", "chunks"), [(2**27, 10), (7 * NUM_CLASSES * 100, 7), (1, 2)])
def test_chunks_are_as_many_as_their_sums_fit_into_memory(
    floats: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_chunks, "_CHUNK_FLOATS", floats)
    assert gradient_chunks.chunks_per_class(100, NUM_CLASSES) == chunks
    assert gradient_chunks.chunk_bytes(100, NUM_CLASSES) == 4 * 100 * NUM_CLASSES * chunks


def test_chunk_sums_take_the_announced_memory(analysis: GradientAnalysis) -> None:
    size = num_parameters(MODEL.abstract_params())
    chunks, _ = gradient_chunks.chunk_gradients(
        passes().sums, PARAMS[4], SPLITS["train"], NUM_CLASSES, advance=lambda _: None
    )
    assert chunks.sums.nbytes <= gradient_chunks.chunk_bytes(size, NUM_CLASSES)
    close(chunks.sums.sum(axis=0), gradients(4, "train").sum(axis=0))
    np.testing.assert_array_equal(np.bincount(chunks.chunk_of), chunks.sizes)


@pytest.mark.parametrize("largest", [4, 16])
def test_a_class_that_fits_into_few_batches_has_as_many_chunks_as_a_large_one(largest: int) -> None:
    whole = split(40, seed=1)
    compiled, counts = passes(largest), np.bincount(whole.labels, minlength=NUM_CLASSES)
    chunks, _ = gradient_chunks.chunk_gradients(compiled.sums, PARAMS[4], whole, NUM_CLASSES, advance=lambda _: None)
    np.testing.assert_array_equal(np.bincount(chunks.classes, minlength=NUM_CLASSES), np.minimum(counts, 10))


def test_costly_network_is_analyzed_by_a_sample_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = passes()
    assert affordable_examples(compiled, 3, 60_000, 10_000) == 60_000
    monkeypatch.setattr(gradient_analysis, "_AFFORDABLE_FLOPS", 0)
    count = affordable_examples(compiled, 3, 60_000, 10_000)
    budget = 2 * 60_000 * compiled.sums.work
    assert 5_000 < count < 60_000
    assert analysis_flops(compiled, 3, count, 10_000) <= budget < analysis_flops(compiled, 3, count + 100, 10_000)
    assert affordable_examples(compiled, 50, 60_000, 10_000) == 5_000, "and not fewer"
    assert affordable_examples(compiled, 50, 4_000, 10_000) == 4_000
