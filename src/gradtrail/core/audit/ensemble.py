"""Cross-validation: logits of every example by networks that were not trained on it.

The training split is cut into folds; a network is trained on all folds but one and evaluated on that one. Validation
and test are evaluated by every network. The cut is repeated with other folds, so that several networks evaluate each
training example. One compilation serves all trainings. Out of scope: scores of the labels, see `scores`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradtrail.core import batching
from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.audit.streams import Stream, stream
from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import squared_grad_norms
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Program
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

BATCH_SIZE = 250  # examples per call of a trained network: a CPU's caches hold no more


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """The compiled functions of an audit."""

    num_classes: int  # number of classes of the data set
    engine: Program  # compiled training of one network, on all folds but one
    logits: CompiledFunction  # params, images → `logits`, float32 (batch, classes)
    grad_norms: CompiledFunction  # params, images, labels → `grad_norm`, float32 (batch,): ‖∇ℓ‖₂ over all parameters

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [*self.engine.functions, self.logits, self.grad_norms]


@dataclass(frozen=True, kw_only=True)
class OutOfFoldLogits:
    """Logits of each example of a split by networks that were not trained on it."""

    logits: Float[np.ndarray, "networks examples classes"]  # logits by network, float32
    # gradient norm with the given label, the mean over the first round's networks, float32
    grad_norm: Float[np.ndarray, " examples"]


def training_size(num_examples: int, folds: int) -> int:
    """Return the number of examples that each network is trained on: of all folds but the largest."""
    return num_examples - -(-num_examples // folds)


def folds_of(num_examples: int, config: AuditConfig, round_: int) -> Int[np.ndarray, " examples"]:
    """Draw the fold of each example, 0 to folds - 1; sizes differ by one at most."""
    rng = np.random.default_rng(stream(config.seed, Stream.FOLDS, round_))
    return rng.permutation(num_examples) % config.folds


def compile_networks(model: Model, config: AuditConfig, num_examples: int, *, compiler: Compiler) -> CrossValidation:
    """Compile the training of a network on a part of `num_examples`, and its evaluation.

    Raises:
        ConfigError: a training cannot be made with these examples; one line that names the key.
    """

    def logits(params: Params, images: Array) -> dict[str, Array]:
        return {"logits": model.apply(params, images)}

    def grad_norms(params: Params, images: Array, labels: Array) -> dict[str, Array]:
        squares, _ = squared_grad_norms(model, params, images, labels, label_smoothing=0.0)
        return {"grad_norm": jnp.sqrt(sum(squares.values(), start=jnp.float32(0)))}

    size = training_size(num_examples, config.folds)
    try:
        program = loop.make_program(config.train_config(), model, size, jax.local_devices())
    except ConfigError as error:  # names the key of a training; that of an audit is called the same
        raise ConfigError(str(error).replace("train.", "audit.", 1)) from None
    images = jax.ShapeDtypeStruct((BATCH_SIZE, *model.config.image_shape), jnp.uint8)
    labels = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
    params = model.abstract_params()
    return CrossValidation(
        num_classes=model.config.num_classes,
        engine=program.compile(compiler),
        logits=compiler.compile("logits", logits, params, images),
        grad_norms=compiler.compile("grad_norms", grad_norms, params, images, labels),
    )


def num_visits(train: Split, other_splits: Mapping[str, Split], config: AuditConfig) -> int:
    """Return the number of examples that the networks of one `cross_validate` train on and evaluate."""
    trained = config.num_networks * config.epochs * training_size(len(train), config.folds)
    return trained + config.rounds * len(train) + config.num_networks * sum(map(len, other_splits.values()))


def cross_validate(
    networks: CrossValidation,
    train: Split,
    other_splits: Mapping[str, Split],
    config: AuditConfig,
    *,
    label_set: int,
    steps_per_call: int,
    advance: Callable[..., object],
) -> dict[str, OutOfFoldLogits]:
    """Train all networks on the labels of `train` and evaluate each on every example that it was not trained on.

    Args:
        networks: functions compiled for the size of `train`.
        other_splits: further splits by name; none of their examples may be in `train`.
        config: the audit: number of networks and seed.
        label_set: number of the set of labels; another one gives other initial weights and orders of the examples, and
            the same folds.
        steps_per_call: steps of a training between two signs of progress; changes no bit of the result.
        advance: called with the number of examples that a network trained on or evaluated, and with 0 and a `message`
            after each network.

    Returns:
        Logits of `train` by `config.rounds` networks, of each other split by all of them.

    Raises:
        FloatingPointError: a training diverged; one line.
    """
    logits_by_split: dict[str, list[np.ndarray]] = {name: [] for name in ("train", *other_splits)}
    norms = {name: np.zeros(len(split), np.float32) for name, split in (("train", train), *other_splits.items())}
    for round_ in range(config.rounds):
        fold_of = folds_of(len(train), config, round_)
        round_logits = np.zeros((len(train), networks.num_classes), np.float32)
        for fold in range(config.folds):
            trained_rows = np.flatnonzero(fold_of != fold)[: training_size(len(train), config.folds)]
            (seed,) = stream(config.seed, Stream.TRAINING, label_set, round_, fold).generate_state(1)
            params = _train(
                networks.engine, train, trained_rows, MemberSeeds.from_one(int(seed)), steps_per_call, advance
            )
            fold_rows = np.flatnonzero(fold_of == fold)
            round_logits[fold_rows] = _rows(networks.logits, params, train.images[fold_rows])["logits"]
            advance(len(fold_rows))
            for name, split in other_splits.items():
                logits_by_split[name].append(_rows(networks.logits, params, split.images)["logits"])
                advance(len(split))
            if round_ == 0:
                norms["train"][fold_rows] = _rows(
                    networks.grad_norms, params, train.images[fold_rows], train.labels[fold_rows]
                )["grad_norm"]
                for name, split in other_splits.items():
                    rows = _rows(networks.grad_norms, params, split.images, split.labels)
                    norms[name] += rows["grad_norm"] / np.float32(config.folds)
            note = f", planted labels {label_set}" if label_set else ""
            advance(0, message=f"network {round_ * config.folds + fold + 1} of {config.num_networks}{note}")
        logits_by_split["train"].append(round_logits)
    return {
        name: OutOfFoldLogits(logits=np.stack(logits), grad_norm=norms[name])
        for name, logits in logits_by_split.items()
    }


def _train(
    engine: Program,
    train: Split,
    rows: Int[np.ndarray, " kept"],
    seeds: MemberSeeds,
    steps_per_call: int,
    advance: Callable[..., object],
) -> Params:
    """Train a network on the examples at `rows`; return its parameters."""
    examples = loop.on_device(train.images[rows], train.labels[rows], engine.mesh)
    done = 0
    for chunk in loop.train(engine, engine.init(keys_of(seeds)), examples, steps_per_call=steps_per_call):
        advance((chunk.step - done) * len(rows) // engine.steps_per_epoch)
        done = chunk.step
        if chunk.ends_epoch and not np.isfinite(np.asarray(chunk.records.loss)).all():
            raise FloatingPointError(
                f"the loss of a network became infinite or NaN in epoch {chunk.epoch}; lower audit.learning_rate"
            )
    return jax.tree.map(np.asarray, engine.evaluation_params(chunk.state))


def _rows(function: CompiledFunction, params: Params, *arrays: np.ndarray) -> dict[str, np.ndarray]:
    return batching.join(list(batching.map_batches(functools.partial(function, params), BATCH_SIZE, *arrays)))
