"""Private training against what DP-SGD is defined to do: batches, clipped sums, noise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from factories import NUM_CLASSES, SHAPE, make_engine, private_config, random_split, run_training
from gradient_oracles import per_example_grads
from scipy import stats

from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.models import Model, by_path
from gradtrail.core.train import loop, threefry
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.dp_sgd import OVERFLOW_SHARE, Mechanism, batch_capacity, noised_mean, poisson_batches
from gradtrail.core.train.history import History
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.optimizers import make_optimizer
from gradtrail.core.train.start import NO_START

SPLIT = random_split(30)
# Of so little gradient and so much noise that the noise alone moves the weights
LOUD = private_config(privacy={"example_clip_norm": 1e-3}, optimizer="sgd", schedule="constant", clip_norm=None)
MECHANISM = Mechanism(noise_multiplier=1.5, num_examples=30, capacity=30, tile=5)


def keys(config: TrainConfig, secret: str | None = None) -> jax.Array:
    return keys_of(config.seeds_of(config.seed), secret)


def trained(config: TrainConfig, noise_multiplier: float, steps_per_call: int = 1000) -> list[loop.Chunk]:
    engine, examples = make_engine(config, SPLIT, noise_multiplier=noise_multiplier)
    return run_training(engine, examples, state=engine.init(keys(config)), steps_per_call=steps_per_call)


FROZEN = {"start": dataclasses.replace(NO_START, weights="w", freeze=("layers/0",))}


@pytest.mark.parametrize(
    "overrides", [{"accumulation_steps": 4}, {"model": "cnn", "optimizer": "adamw"}, FROZEN], ids=str
)
def test_a_step_is_that_of_the_definition(overrides: dict) -> None:
    """Gradients of all examples of a batch by `vmap(grad)`, each clipped, their sum over the mean size of a batch.

    Those of a frozen layer are 0 before they are clipped.
    """
    clip_norm = 0.2
    config = private_config(privacy={"example_clip_norm": clip_norm}, batch_size=8, epochs=1, **overrides)
    engine, _ = make_engine(config, SPLIT, noise_multiplier=0.0)
    model = Model(config.model_config(SHAPE, NUM_CLASSES))
    optimizer = make_optimizer(config.optimizer, config.schedule, config.clip_norm, engine.num_steps)
    state = engine.init(keys(config))
    params, opt_state, num_clipped = state.params, jax.jit(optimizer.init)(state.params), 0
    split_images, split_labels = jnp.asarray(SPLIT.images), jnp.asarray(SPLIT.labels)

    @jax.jit
    def step(params, opt_state, batch):  # type: ignore[no-untyped-def]
        images, labels = split_images[batch], split_labels[batch]  # of padding too; it counts for nothing
        item = per_example_grads(model, params, images, labels, loss=config.loss)
        if config.start.enabled:
            item["layers"][0] = jax.tree.map(jnp.zeros_like, item["layers"][0])
        norms = jnp.sqrt(sum(jnp.sum(leaf.reshape(len(leaf), -1) ** 2, axis=1) for leaf in jax.tree.leaves(item)))
        factors = jnp.where(batch == PADDING, 0.0, jnp.minimum(1.0, clip_norm / norms))
        grads = jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1) / config.batch_size, item)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        clipped = jnp.sum((norms > clip_norm) & (batch != PADDING))
        return optax.apply_updates(params, updates), opt_state, clipped

    order = np.asarray(engine.order(state.keys, np.int32(0)))
    for batch in order:
        params, opt_state, clipped = step(params, opt_state, batch)
        num_clipped += int(clipped)
    assert num_clipped > 10
    last = trained(config, 0.0)[-1]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6), last.state.params, params)
    np.testing.assert_array_equal(last.records.rows.indices, order)
    sizes = np.sum(order != PADDING, axis=1)
    np.testing.assert_array_equal(last.records.metrics["num_examples"], sizes)
    assert len({*sizes.tolist()}) > 1
    assert np.sum(np.asarray(last.records.metrics["clipped"]) * sizes) == pytest.approx(num_clipped, rel=1e-4)
    for path, leaf in by_path(state.params).items() if config.start.enabled else ():
        is_same = np.array_equal(by_path(last.state.params)[path], leaf)
        assert is_same == path.startswith("layers/0"), path
    accuracy = np.asarray(last.records.metrics["accuracy"])
    assert np.all((accuracy >= 0) & (accuracy <= 1))


def test_example_that_overflows_does_not_end_the_training() -> None:
    """The weights of two pixels, which a single image has, make its logits infinite."""
    images = SPLIT.images.copy()
    images[:, 0, :2] = 0
    images[4, 0, :2] = 255
    engine, examples = make_engine(LOUD, dataclasses.replace(SPLIT, images=images), noise_multiplier=1e3)
    state = engine.init(keys(LOUD))
    kernel = np.array(state.params["layers"][0]["kernel"])
    kernel[:2] = 3e38
    state.params["layers"][0]["kernel"] = jnp.asarray(kernel)
    chunks = run_training(engine, examples, state=state)
    assert any(4 in np.asarray(chunk.records.rows.indices) for chunk in chunks)
    history = History((), {}, len(SPLIT))
    for chunk in chunks:
        history.add(chunk, jax.device_get(chunk.state.params), {"loss": 0.0, "accuracy": 0.0})
    assert len(history.epochs) == LOUD.epochs


def test_noise_has_the_stated_deviation_and_is_independent() -> None:
    config = private_config(privacy={"example_clip_norm": 0.5}, batch_size=10)

    @jax.jit
    def draw(key: jax.Array) -> dict:
        zeros = {"a": jnp.zeros((100, 200)), "b": jnp.zeros(5_000)}
        first, second = (noised_mean(zeros, config, MECHANISM, key=part) for part in jax.random.split(key))
        return {"a": first["a"].ravel(), "b": first["b"], "later": second["a"].ravel()}

    drawn = jax.device_get(draw(jax.random.key(3)))
    deviation = 1.5 * 0.5 / 10
    for values in drawn.values():
        assert stats.kstest(values / deviation, "norm").pvalue > 1e-3
        assert np.std(values) == pytest.approx(deviation, rel=4 / np.sqrt(2 * len(values)))
    for one, other in (("a", "later"), ("a", "b")):
        size = min(len(drawn[one]), len(drawn[other]))
        assert abs(np.corrcoef(drawn[one][:size], drawn[other][:size])[0, 1]) < 4 / np.sqrt(size)


def test_frozen_layers_get_no_noise() -> None:
    """Nor does it count in the norm of the gradient for the optimizer."""
    config = dataclasses.replace(LOUD, **FROZEN)
    first, last = make_engine(config, SPLIT, noise_multiplier=1e3)[0].init(keys(config)), trained(config, 1e3)[-1]
    is_same = jax.tree.map(np.array_equal, first.params["layers"], last.state.params["layers"])
    assert is_same == {0: {"bias": True, "kernel": True}, 1: {"bias": False, "kernel": False}}
    size, deviation = sum(leaf.size for leaf in jax.tree.leaves(first.params["layers"][1])), 1e3 * 1e-3 / 4
    assert np.mean(np.square(last.records.metrics["grad_norm"])) == pytest.approx(size * deviation**2, rel=0.5)


def test_noise_differs_between_steps() -> None:
    """A network that learns nothing moves by the noise alone: no two steps by the same."""
    engine, _ = make_engine(LOUD, SPLIT, noise_multiplier=1e3)
    states = [engine.init(keys(LOUD)), *(chunk.state for chunk in trained(LOUD, 1e3, steps_per_call=1))]
    walk = np.stack([state.params["layers"][0]["kernel"] for state in states])
    moves = np.diff(walk, axis=0).reshape(len(walk) - 1, -1)
    correlation = np.corrcoef(moves) - np.eye(len(moves))
    assert len(moves) == engine.num_steps
    assert np.abs(correlation).max() < 0.9


def test_examples_are_drawn_independently_at_the_rate() -> None:
    mechanism = dataclasses.replace(MECHANISM, num_examples=200, capacity=120)
    batches = poisson_batches(mechanism, 50, 2_000, key=jax.random.key(1), epoch=0)
    drawn = np.stack([np.bincount(batch[batch != PADDING], minlength=200) for batch in batches])
    assert drawn.max() == 1  # no example twice in a batch
    sizes = drawn.sum(axis=1)
    assert np.mean(sizes) == pytest.approx(50, abs=4 * np.sqrt(37.5 / 2_000))
    assert np.var(sizes) == pytest.approx(37.5, rel=4 * np.sqrt(2 / 2_000))
    assert stats.chisquare(drawn.sum(axis=0)).pvalue > 1e-3
    correlation = np.corrcoef(drawn.T)[np.triu_indices(200, 1)]
    assert np.std(correlation) == pytest.approx(1 / np.sqrt(2_000), rel=0.05)
    padded = batches == PADDING
    np.testing.assert_array_equal(padded, np.sort(padded, axis=1))  # padding comes last


def test_a_batch_without_room_is_an_error_and_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size: Poisson sampling drew more than 5 examples for batch"):
        poisson_batches(dataclasses.replace(MECHANISM, capacity=5), 5, 20, key=jax.random.key(0), epoch=0)


@pytest.mark.parametrize(
    ("num_examples", "batch_size", "num_steps"), [(55_000, 128, 4_300), (300, 20, 10), (50, 49, 9)]
)
def test_the_chance_of_a_batch_without_room_is_bounded(num_examples: int, batch_size: int, num_steps: int) -> None:
    room = batch_capacity(num_examples, batch_size, num_steps, delta=1e-5)
    chance = num_steps * stats.binom.sf(room, num_examples, batch_size / num_examples)
    assert chance <= 1e-5 * OVERFLOW_SHARE
    assert batch_size < room <= num_examples
    assert num_examples < 1_000 or chance > 1e-4 * 1e-5 * OVERFLOW_SHARE  # not needlessly large


def test_members_never_share_batches_or_noise() -> None:
    config = private_config(seed=4, members=3, vary=("initialization",))
    assert [config.seeds_of(seed).noise for seed in config.seeds] == [4, 5, 6]
    assert [config.seeds_of(seed).order for seed in config.seeds] == [4, 5, 6]


def test_noise_uses_each_normal_of_its_key_once() -> None:
    """Not of `jax.random`'s, none of which is beyond 5.2 standard deviations."""
    config = private_config(batch_size=1, privacy={"example_clip_norm": 1.0})
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=1.0)

    @jax.jit
    def both(key: jax.Array) -> tuple:
        zeros = {"a": jnp.zeros((30, 7)), "b": jnp.zeros(40), "c": jnp.zeros(())}
        return noised_mean(zeros, config, mechanism, key=key), threefry.normals(key, 251)

    drawn, expected = both(jax.random.key(0))
    np.testing.assert_allclose(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(drawn)]), expected, rtol=1e-6)


def test_batches_are_a_function_of_key_and_epoch() -> None:
    mechanism = dataclasses.replace(MECHANISM, num_examples=1_000, capacity=1_000)

    def draw(seed: int, epoch: int) -> np.ndarray:
        batches = poisson_batches(mechanism, 500, 8, key=jax.random.key(seed), epoch=epoch)
        return np.stack([np.bincount(batch[batch != PADDING], minlength=1_000) for batch in batches]).ravel()

    pairs = [(1, 0), (1, 1), (2, 0), (2, 1), (0, 1)]
    np.testing.assert_array_equal(draw(1, 0), draw(1, 0))
    correlation = np.corrcoef([draw(*pair) for pair in pairs])[np.triu_indices(len(pairs), 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(8_000)


def test_a_rate_of_one_draws_every_example() -> None:
    mechanism = dataclasses.replace(MECHANISM, capacity=35)
    batches = poisson_batches(mechanism, 30, 4, key=jax.random.key(2), epoch=0)
    np.testing.assert_array_equal(batches, np.tile([*range(30), *[PADDING] * 5], (4, 1)))


def test_networks_that_differ_in_any_seed_have_no_noise_of_a_secret_in_common() -> None:
    """Else their difference would have none: such as that of a member that varies the order alone, and a training."""
    seeds = MemberSeeds(initialization=1, order=2, augmentation=1, dropout=1, noise=2)
    other_values = [dataclasses.replace(seeds, **{name: 3}) for name in ("initialization", "augmentation", "dropout")]
    result, *rest = (np.asarray(jax.random.key_data(keys_of(item, "a secret"))) for item in [seeds, *other_values])
    for other in rest:
        assert np.all(np.any(result[1:] != other[1:], axis=1))


def test_a_secret_changes_all_keys_but_that_of_the_initial_weights() -> None:
    seeds = MemberSeeds(initialization=1, order=1, augmentation=1, dropout=1, noise=1)
    plain, secret, other = (
        np.asarray(jax.random.key_data(keys_of(seeds, text))) for text in (None, "a secret", "another")
    )
    assert np.any(plain != secret, axis=1).tolist() == [False, True, True, True, True]
    assert np.any(secret != other, axis=1).tolist() == [False, True, True, True, True]
    for rows in (plain[[1, 4]], secret):
        assert len(np.unique(rows, axis=0)) == len(rows), "no two purposes share a key"
