"""Out-of-fold networks: logits of every example by networks that were not trained on it.

The training split is cut into folds; a network is trained on all folds but one and evaluated on that one. Validation
and test are evaluated by every network. The cut is repeated with other folds, so that several networks evaluate each
training example. The same is repeated with planted wrong labels. One compilation serves all trainings. Out of scope:
what follows from the logits, see `labels`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradtrail.core.audit.labels import (
    OutOfFold,
    Stream,
    draw_confused,
    draw_uniform,
    mean_probabilities,
    plant,
    stream,
)
from gradtrail.core.config import Bounds, Count, GallerySize, PositiveShare, Seed, config
from gradtrail.core.data import Split
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.inference import abstract_batch
from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.per_example import squared_grad_norms
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.optimizers import AdamW
from gradtrail.core.train.plain import PLAIN
from gradtrail.core.train.schedules import OneCycle
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass, compile_within

BATCH_SIZE = 250  # largest number of examples per call of a trained network: a CPU's caches hold no more
NOISE_KINDS = ("uniform", "confused")  # of planted labels


@config
class AuditConfig:
    """The params of `make audit`: `folds` times `rounds` networks for each of three sets of labels."""

    seed: Seed  # seed of the folds, the trainings and the planted noise
    quick: bool  # True if one round is made instead of `rounds`, for a first look
    folds: Annotated[int, Bounds(at_least=2, at_most=100)]  # parts of the training split; one is held out
    rounds: Annotated[int, Bounds(at_least=1, at_most=100)]  # number of times the split is cut into folds
    epochs: Count  # passes of each training
    batch_size: int  # examples per optimizer step
    learning_rate: float  # peak of the one-cycle schedule, with AdamW
    weight_decay: float  # decay per step, times the learning rate
    channels: tuple[int, ...]  # channels of each stack of convolutions
    hidden: tuple[int, ...]  # width of each hidden dense layer
    precision: Precision  # precision of matrix products and convolutions in training
    noise_rate: PositiveShare  # share of the training labels that are planted wrong, to choose and to test the score
    num_suspects: GallerySize  # images in the gallery of each split

    def check(self) -> None:
        self.train_config()  # raises ValueError if a field is no valid value of a training

    @property
    def num_rounds(self) -> int:
        return 1 if self.quick else self.rounds

    @property
    def num_networks(self) -> int:  # for each set of labels
        return self.folds * self.num_rounds

    @property
    def num_epochs(self) -> int:  # of all trainings together
        return (1 + len(NOISE_KINDS)) * self.num_networks * self.epochs

    def train_config(self) -> TrainConfig:
        """Return the training of one network: a small CNN, with AdamW and the one-cycle schedule."""
        return dataclasses.replace(
            PLAIN,
            seed=self.seed,
            epochs=self.epochs,
            batch_size=self.batch_size,
            model=CNN(
                channels=self.channels,
                convolutions=1,
                kernel_size=3,
                norm="none",
                groups=1,
                hidden=self.hidden,
                activation="relu",
                dropout=0.0,
            ),
            precision=self.precision,
            optimizer=AdamW(
                learning_rate=self.learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=self.weight_decay
            ),
            schedule=OneCycle(warmup_fraction=0.3, div_factor=25.0, final_div_factor=10_000.0),
            clip_norm=1.0,
        )


class CrossValidation:
    """The networks of an audit, compiled once for all trainings."""

    def __init__(self, model: Model, config: AuditConfig, num_examples: int, *, compiler: Compiler) -> None:
        def logits(params: Params, images: Array, _: Array) -> dict[str, Array]:
            return {"logits": model.apply(params, images)}

        def grad_norms(params: Params, images: Array, labels: Array) -> dict[str, Array]:
            squares, _ = squared_grad_norms(model, params, images, labels, loss=CROSS_ENTROPY)
            return {"grad_norm": jnp.sqrt(sum(squares.values(), start=jnp.float32(0)))}

        self.config, self.num_classes = config, model.config.num_classes
        self.training_size = num_examples - -(-num_examples // config.folds)  # all folds but the largest
        training = loop.TrainingFunctions(config.train_config(), model, self.training_size, jax.local_devices())
        self.training = training.compile(compiler)

        def compiled(name: str, function: Callable[..., dict[str, Array]]) -> Pass:
            def compile_at(size: int) -> CompiledFunction:
                return compiler.compile(name, function, model.abstract_params(), *abstract_batch(model, size))

            return compile_within(BATCH_SIZE, compile_at)

        self.logits, self.grad_norms = compiled("logits", logits), compiled("grad_norms", grad_norms)
        self.functions = [*self.training.functions, self.logits.function, self.grad_norms.function]

    def run(
        self, splits: Mapping[str, Split], *, advance: Callable[..., object]
    ) -> tuple[dict[str, OutOfFold], dict[str, OutOfFold]]:
        """Train all networks of the audit.

        A planted label differs from the given one, which counts as correct. `uniform`: each other class is equally
        likely. `confused`: as likely as the networks trained on the given labels find it. Either way the examples are
        chosen at random.

        Args:
            splits: `train`, and further splits that have no example of it.
            advance: called after each epoch, and with 0 and a `message` after each network.

        Returns:
            Logits of each split with its given labels; of the training split with planted ones, by kind of noise.
        """
        train, seed = splits["train"], self.config.seed
        out_of_fold = self.run_label_set(splits, 0, advance)
        mean = mean_probabilities(out_of_fold["train"].logits, 1.0)
        planted = {}
        for label_set, kind in enumerate(NOISE_KINDS, start=1):
            draw = stream(seed, Stream.PLANTED_LABELS, label_set)
            if kind == "uniform":
                wrong = draw_uniform(train.labels, self.num_classes, seed=draw)
            else:
                wrong = draw_confused(mean, train.labels, seed=draw)
            places = stream(seed, Stream.PLANTED_PLACES, label_set)
            copy = dataclasses.replace(train, labels=plant(train.labels, wrong, self.config.noise_rate, seed=places))
            planted[kind] = self.run_label_set({"train": copy}, label_set, advance)["train"]
        return out_of_fold, planted

    def run_label_set(
        self, splits: Mapping[str, Split], label_set: int, advance: Callable[..., object]
    ) -> dict[str, OutOfFold]:
        """Train networks on one set of labels and evaluate each on every example that it was not trained on.

        The result is the logits of `train` by one network of each round, of each other split by all networks. Sets of
        labels differ in initial weights and orders of the examples, and have the same folds.
        """
        train, config = splits["train"], self.config
        num_logits = {name: config.num_rounds if name == "train" else config.num_networks for name in splits}
        shape = {name: (num_logits[name], len(split), self.num_classes) for name, split in splits.items()}
        logits = {name: np.zeros(shape[name], np.float32) for name in splits}
        norms = {name: np.zeros(len(split), np.float32) for name, split in splits.items()}
        for round_, fold in itertools.product(range(config.num_rounds), range(config.folds)):
            network = round_ * config.folds + fold
            rng = np.random.default_rng(stream(config.seed, Stream.FOLDS, round_))
            fold_of = rng.permutation(len(train)) % config.folds  # sizes differ by one at most
            rows = np.flatnonzero(fold_of != fold)[: self.training_size]
            (seed,) = stream(config.seed, Stream.TRAINING, label_set, round_, fold).generate_state(1)
            params = self._train(train.images[rows], train.labels[rows], int(seed), advance)

            # a training example is evaluated by one network of the round, others by all
            for name, split in splits.items():
                is_train = name == "train"
                rows = np.flatnonzero(fold_of == fold) if is_train else np.arange(len(split))
                images, labels = split.images[rows], split.labels[rows]
                logits[name][round_ if is_train else network, rows] = self.logits(params, images, labels)["logits"]
                if round_ == 0:
                    norm = self.grad_norms(params, images, labels)["grad_norm"]
                    norms[name][rows] += norm / np.float32(1 if is_train else config.folds)

            note = f", planted labels {label_set}" if label_set else ""
            advance(0, message=f"network {network + 1} of {config.num_networks}{note}")
        return {
            name: OutOfFold(labels=split.labels, logits=logits[name], grad_norm=norms[name])
            for name, split in splits.items()
        }

    def _train(self, images: np.ndarray, labels: np.ndarray, seed: int, advance: Callable[..., object]) -> Params:
        state = self.training.init(keys_of(MemberSeeds.from_one(seed)))
        examples = loop.on_device(images, labels, self.training.mesh)
        for epoch in self.training.train(state, examples, steps_per_call=self.training.steps_per_epoch):
            if not np.isfinite(np.asarray(epoch.records.metrics["loss"])).all():
                raise FloatingPointError(
                    f"the loss of a network became infinite or NaN in epoch {epoch.epoch}; lower audit.learning_rate"
                )
            state = epoch.state
            advance(1)
        return jax.tree.map(np.asarray, state.evaluation_params)
