"""Networks that judge examples that they did not train on.

The training split is cut into folds; a network is trained on all folds but one and judges that one. Validation and test
are judged by every network. The cut is repeated with other folds, so that each training example has several judges.
One compilation serves all trainings. Out of scope: what the logits say about the labels, see `scores`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradtrail.core.audit.config import AuditConfig
from gradtrail.core.audit.streams import Stream, stream
from gradtrail.core.common import batching
from gradtrail.core.common.split import Split
from gradtrail.core.common.validation import ConfigError
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example.norms import squared_grad_norms
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Engine
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

BATCH_SIZE = 250  # examples that are judged at once: a CPU's caches hold no more


@dataclass(frozen=True, kw_only=True)
class Judges:
    """The compiled functions of an audit.

    Attributes:
        num_classes: of the data set.
        engine: of one training, on all folds but one.
        logits: params, images → `logits`, float32 (batch, classes).
        grad_norms: params, images, labels → `grad_norm`, float32 (batch,): ‖∇ℓ‖₂ over all parameters.
    """

    num_classes: int
    engine: Engine
    logits: CompiledFunction
    grad_norms: CompiledFunction

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [*self.engine.functions, self.logits, self.grad_norms]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the networks say of the examples of one split.

    Attributes:
        logits: of each judge, float32; none was trained on the example that it judges.
        grad_norm: of each example with its given label, the mean over the judges of the first round, float32.
    """

    logits: Float[np.ndarray, "judges examples classes"]
    grad_norm: Float[np.ndarray, " examples"]


def training_size(num_examples: int, folds: int) -> int:
    """Return the number of examples that each network is trained on: of all folds but the largest."""
    return num_examples - -(-num_examples // folds)


def folds_of(num_examples: int, config: AuditConfig, round_: int) -> Int[np.ndarray, " examples"]:
    """Draw the fold of each example, 0 to folds - 1; sizes differ by one at most."""
    rng = np.random.default_rng(stream(config.seed, Stream.FOLDS, round_))
    return rng.permutation(num_examples) % config.folds


def compile_judges(model: Model, config: AuditConfig, num_examples: int, *, compiler: Compiler) -> Judges:
    """Compile the training of a network on a part of `num_examples`, and what it judges with.

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
    return Judges(
        num_classes=model.config.num_classes,
        engine=loop.compile_engine(program, compiler=compiler),
        logits=compiler.compile("logits", logits, params, images),
        grad_norms=compiler.compile("grad_norms", grad_norms, params, images, labels),
    )


def num_visits(train: Split, others: Mapping[str, Split], config: AuditConfig) -> int:
    """Return how many examples the networks of one `judge` train on and judge, in all."""
    trained = config.num_networks * config.epochs * training_size(len(train), config.folds)
    return trained + config.rounds * len(train) + config.num_networks * sum(map(len, others.values()))


def judge(
    judges: Judges,
    train: Split,
    others: Mapping[str, Split],
    config: AuditConfig,
    *,
    labelling: int,
    steps_per_call: int,
    advance: Callable[..., object],
) -> dict[str, Judgement]:
    """Train all networks on the labels of `train` and let them judge every example that they have not seen.

    Args:
        judges: compiled for the size of `train`.
        train: the training split.
        others: further splits, by name; none of their examples may be in `train`.
        config: number of networks and the seed.
        labelling: number of the set of labels; another one gives other initial weights and orders of the examples, and
            the same folds.
        steps_per_call: steps of a training between two signs of progress; changes no bit of the result.
        advance: called with the number of examples that a network has trained on or judged, and with 0 and a `message`
            after each network.

    Returns:
        For `train` a judgement by `config.rounds` networks, for each other split by all of them.

    Raises:
        FloatingPointError: a training diverged; one line.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("train", *others)}
    norms = {name: np.zeros(len(split), np.float32) for name, split in (("train", train), *others.items())}
    for round_ in range(config.rounds):
        fold_of = folds_of(len(train), config, round_)
        of_round = np.zeros((len(train), judges.num_classes), np.float32)
        for fold in range(config.folds):
            kept = np.flatnonzero(fold_of != fold)[: training_size(len(train), config.folds)]
            (seed,) = stream(config.seed, Stream.TRAINING, labelling, round_, fold).generate_state(1)
            params = _train(judges.engine, train, kept, MemberSeeds.from_one(int(seed)), steps_per_call, advance)
            own = np.flatnonzero(fold_of == fold)
            of_round[own] = _rows(judges.logits, params, train.images[own])["logits"]
            advance(len(own))
            for name, split in others.items():
                found[name].append(_rows(judges.logits, params, split.images)["logits"])
                advance(len(split))
            if round_ == 0:
                norms["train"][own] = _rows(judges.grad_norms, params, train.images[own], train.labels[own])[
                    "grad_norm"
                ]
                for name, split in others.items():
                    rows = _rows(judges.grad_norms, params, split.images, split.labels)
                    norms[name] += rows["grad_norm"] / np.float32(config.folds)
            which = f", planted labels {labelling}" if labelling else ""
            advance(0, message=f"network {round_ * config.folds + fold + 1} of {config.num_networks}{which}")
        found["train"].append(of_round)
    return {name: Judgement(logits=np.stack(logits), grad_norm=norms[name]) for name, logits in found.items()}


def _train(
    engine: Engine,
    train: Split,
    kept: Int[np.ndarray, " kept"],
    seeds: MemberSeeds,
    steps_per_call: int,
    advance: Callable[..., object],
) -> Params:
    """Train a network on the examples at `kept`; return its parameters."""
    examples = loop.on_device(train.images[kept], train.labels[kept], engine.mesh)
    done = 0
    for chunk in loop.train(engine, engine.init(keys_of(seeds)), examples, steps_per_call=steps_per_call):
        advance((chunk.step - done) * len(kept) // engine.steps_per_epoch)
        done = chunk.step
        if chunk.ends_epoch and not np.isfinite(np.asarray(chunk.records.loss)).all():
            raise FloatingPointError(
                f"the loss of a network became infinite or NaN in epoch {chunk.epoch}; lower audit.learning_rate"
            )
    return jax.tree.map(np.asarray, engine.evaluation_params(chunk.state))


def _rows(function: CompiledFunction, params: Params, *arrays: np.ndarray) -> dict[str, np.ndarray]:
    return batching.join(list(batching.map_batches(functools.partial(function, params), BATCH_SIZE, *arrays)))
