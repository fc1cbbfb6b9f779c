"""What if a training example had not been there? Smoothness of a training, and tables of predicted changes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split
from gradtrail.core.gradients.metagradient import Metagradient, compile_metagradient, require_differentiable
from gradtrail.core.gradients.scores import largest
from gradtrail.core.gradients.what_if import SMOOTH, WhatIfConfig, make_outputs, metasmoothness, positions_of
from gradtrail.core.nn.inference import compile_predict_within, validate
from gradtrail.core.nn.losses import log_odds
from gradtrail.core.nn.models import HostParams, Model, Params
from gradtrail.core.train.changes import NO_CHANGES, changed_labels, weight_changes
from gradtrail.core.train.config import TrainConfig, for_split
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import on_device
from gradtrail.core.train.step import TrainState
from gradtrail.core.xla.compiler import CompiledFunction, Compiler
from gradtrail.core.xla.passes import Pass
from gradtrail.stages.common.stage import Stage
from gradtrail.stages.data import data_files
from gradtrail.stages.data.data_files import DatasetInfo
from gradtrail.stages.model.members import weights_paths
from gradtrail.stages.model.start import read_start
from gradtrail.stages.model.weights import read_members
from gradtrail.support.memory import require_memory_for_model
from gradtrail.support.progress import progress_bar

VALIDATION_LOSS = "validation_loss"  # name of the output that belongs to no test example
_SUBSETS, _SUBSET_SHARE = 2, 0.01  # random subsets by which metasmoothness is measured


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Predictions of the trained networks, means over the members."""

    train: Float[np.ndarray, "examples classes"]  # logits
    test: Float[np.ndarray, "tests classes"]  # logits
    margins: Float[np.ndarray, " tests"]  # margins of the test examples, in nats
    validation_loss: float  # in nats


def choose_examples(
    margins: Float[np.ndarray, " tests"], is_mistake: Bool[np.ndarray, " tests"], count: int
) -> Int[np.ndarray, " chosen"]:
    """Return the positions of mistakes, evenly spaced by their margin, from the highest to the lowest one.

    If there are fewer than `count`, return the lowest margins.
    """
    ranked = largest(-margins, len(margins))
    mistakes = ranked[is_mistake[ranked]]
    candidates = (mistakes if len(mistakes) >= count else ranked[:count])[::-1]
    places = np.linspace(0, len(candidates) - 1, min(count, len(candidates)))
    chosen: np.ndarray = candidates[places.round().astype(np.int64)]
    return chosen


@dataclass(kw_only=True)
class WhatIf:
    """The outputs to ask about, their compiled derivatives, and the predicted changes."""

    config: WhatIfConfig
    train_config: TrainConfig
    info: DatasetInfo
    splits: Mapping[str, Split]
    weights: Mapping[int, Path]  # file of each trained network by its seed
    rows: Int[np.ndarray, " chosen"]  # positions of the test examples to ask about; if empty, `compile` chooses them
    predict: Pass = field(init=False, repr=False)
    log_odds: CompiledFunction = field(init=False, repr=False)  # logits of the test examples → their margins
    networks: Networks = field(init=False, repr=False)
    metagradient: Metagradient = field(init=False, repr=False)
    smoothness: float = field(init=False)
    influence: pd.DataFrame | None = field(init=False, default=None)  # None if the training is not smooth enough

    @classmethod
    def load(cls, stage: Stage) -> "WhatIf":
        """Read the inputs of the stage.

        Raises:
            UserError: data or weights are missing or damaged.
            ConfigError: the training has no derivative, or a test example is not in its split.
        """
        config, train_config = stage.params(WhatIfConfig), stage.params(TrainConfig, "train")
        require_differentiable(train_config)
        folder = Path("data/processed")
        info, splits = data_files.read_info(folder), data_files.read_splits(folder)
        return cls(
            config=config,
            train_config=for_split(train_config, splits["train"], info.num_classes),
            info=info,
            splits=splits,
            weights=weights_paths(Path("models"), "final"),
            rows=positions_of(config.test_examples, splits["test"], "what_if.test_examples"),
        )

    def compile(self, compiler: Compiler) -> None:
        """Compile all functions; the trained networks are evaluated on the way, as their mistakes are the outputs.

        Raises:
            ConfigError: the derivative needs more memory than configured; one line.
        """
        config, test = self.train_config, self.splits["test"]
        model = Model(config.model_config(self.info.image_shape, self.info.num_classes), remat=config.remat)
        self.predict = compile_predict_within(model, compiler=compiler)
        logits = jax.ShapeDtypeStruct((len(test), self.info.num_classes), np.float32)
        self.log_odds = compiler.compile("log_odds", log_odds, logits, test.labels)
        self.networks = self._predict_members()
        start = read_start(config.start, model) if config.start.enabled else None
        self.train_config = config = dataclasses.replace(config, start=start.config) if start else config
        if not len(self.rows):
            is_mistake = self.networks.test.argmax(axis=1) != test.labels
            self.rows = choose_examples(self.networks.margins, is_mistake, self.config.num_examples)
        outputs = make_outputs(model, test[self.rows], self.splits["validation"], config.batch_size)
        num_examples, memory = len(self.splits["train"]), self.config.memory_mib * 2**20
        self.metagradient = compile_metagradient(
            config, model, num_examples, outputs, memory_bytes=memory, compiler=compiler
        )
        self.metagradient = dataclasses.replace(self.metagradient, start=start.tensors if start else {})
        require_memory_for_model("what_if", self.functions, host_bytes=0)

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [self.predict.function, self.log_odds, *self.metagradient.functions]

    @property
    def outputs(self) -> pd.DataFrame:
        """The outputs of the trained networks, see `output_table`."""
        return output_table(self.networks, self.splits["test"], self.rows)

    def run(self) -> None:
        """Measure the metasmoothness; if the training is smooth, predict the effects of its examples on the outputs."""
        train, metagradient = self.splits["train"], self.metagradient
        unchanged = np.zeros((len(train), self.info.num_classes), np.float32)
        examples = on_device(train.images, train.labels, metagradient.training.mesh, unchanged)
        num_steps, runs = metagradient.training.num_steps, 2 * _SUBSETS + 2 * self.train_config.members
        with progress_bar("what_if", runs * num_steps, unit="steps") as bar:
            states = self._train(self.train_config.seed, examples, bar.advance)
            self.smoothness = self._measure_smoothness(examples, states[-1], bar.advance)
            if self.smoothness >= SMOOTH:
                derivative = self._mean_derivative(examples, states, bar.advance)
                names = list(self.outputs["output"])
                self.influence = influence_table(train, self.networks.train, names, derivative)

    def write(self, new: Path) -> None:
        """Write the tables to the folder of the new outs; that of effects only if the training is smooth."""
        folder = new / "results" / "what_if"
        folder.mkdir(parents=True)
        self.outputs.to_csv(folder / "outputs.csv", index=False, float_format="%.9g")
        if self.influence is not None:
            self.influence.to_parquet(folder / "influence.parquet", index=False)

    def margins(self, params: Params | HostParams) -> Float[np.ndarray, " tests"]:
        """Return the margins of the test examples, in nats, of a network with these parameters."""
        test = self.splits["test"]
        return np.asarray(self.log_odds(self.predict(params, test.images, test.labels)["logits"], test.labels))

    def _predict_members(self) -> Networks:
        """Return the mean predictions of the members."""
        members = []
        for _, _, params, _ in read_members(self.weights, self.info):
            parts = (self.splits[name] for name in ("train", "test"))
            logits = [self.predict(params, part.images, part.labels)["logits"] for part in parts]
            loss = validate(self.predict, params, self.splits["validation"])["loss"]
            members.append((*logits, self.margins(params), loss))
        train, test, margins, loss = (np.mean(parts, axis=0) for parts in zip(*members, strict=True))
        return Networks(train=train, test=test, margins=margins, validation_loss=float(loss))

    def _train(self, seed: int, examples: Examples, advance: Callable[[int], object]) -> list[TrainState]:
        """Train a member; return the states that its derivative needs."""
        states = list(self.metagradient.states(keys_of(self.train_config.seeds_of(seed)), examples))
        advance(self.metagradient.training.num_steps)
        return states

    def _measure_smoothness(self, examples: Examples, last: TrainState, advance: Callable[[int], object]) -> float:
        """Return the metasmoothness of the training of the first member, by random subsets of 1 % of the examples.

        A subset has at least one example; `last` is the state at the end without changes.
        """
        config, train, num_classes = self.train_config, self.splits["train"], self.info.num_classes

        def margins_after(changes: np.ndarray) -> np.ndarray:
            changed = dataclasses.replace(examples, weight_changes=jax.device_put(changes))
            state = self.metagradient.train(keys_of(config.seeds_of(config.seed)), changed)
            advance(self.metagradient.training.num_steps)
            return self.margins(state.evaluation_params)

        share = max(_SUBSET_SHARE, 1 / len(train))
        subsets = [dataclasses.replace(NO_CHANGES, omit_fraction=share, omit_seed=seed) for seed in range(_SUBSETS)]
        labels = [changed_labels(subset, train.labels, train.example_id, num_classes) for subset in subsets]
        changes = [weight_changes(train.labels, one, num_classes) for one in labels]
        return metasmoothness(self.margins(last.evaluation_params), margins_after, changes)

    def _mean_derivative(
        self, examples: Examples, states: list[TrainState], advance: Callable[[int], object]
    ) -> Float[np.ndarray, "outputs examples classes"]:
        """Return the derivative of the outputs by `Examples.weight_changes`, mean over the members.

        `states` are those of the first member, which is trained already; `derivative` takes them from the list.
        """
        total: Any = np.float32(0)
        for seed in self.train_config.seeds:
            states = states or self._train(seed, examples, advance)
            _, derivative = self.metagradient.derivative(states, examples, advance)
            total = total + derivative / np.float32(self.train_config.members)
        if not np.isfinite(total).all():
            raise ConfigError("what_if: train has a derivative that is not finite; a smoother network may help")
        return np.asarray(total)


def output_table(networks: Networks, test: Split, rows: Int[np.ndarray, " chosen"]) -> pd.DataFrame:
    """Return a row for each output: the margins of the test examples at these positions, and the validation loss.

    `output` is the `example_id` or `validation_loss`, `label` and `predicted` are numbers of classes. Values are in
    nats.
    """
    columns = {
        "output": [*map(str, test.example_id[rows]), VALIDATION_LOSS],
        "label": [*test.labels[rows], None],
        "predicted": [*networks.test[rows].argmax(axis=1), None],
        "value": [*networks.margins[rows], networks.validation_loss],
    }
    return pd.DataFrame(columns).astype({"label": "Int32", "predicted": "Int32", "value": "float64"})


def influence_table(
    train: Split,
    logits: Float[np.ndarray, "examples classes"],
    names: Sequence[str],
    derivative: Float[np.ndarray, "outputs examples classes"],
) -> pd.DataFrame:
    """Return a row for each training example: the predicted changes of the outputs with these names.

    `remove/<output>` is the change if the example is removed, `relabel/<output>` if it gets the label `proposed_label`,
    the most probable class other than its label. Labels are numbers of classes.
    """
    rows, candidates = np.arange(len(train)), logits.copy()
    candidates[rows, train.labels] = -np.inf
    proposed = candidates.argmax(axis=1).astype(np.int32)
    remove, add = -derivative[:, rows, train.labels], derivative[:, rows, proposed]
    columns = {"example_id": train.example_id, "label": train.labels, "proposed_label": proposed}
    columns |= {f"remove/{name}": change for name, change in zip(names, remove, strict=True)}
    columns |= {f"relabel/{name}": change for name, change in zip(names, remove + add, strict=True)}
    return pd.DataFrame(columns)


def describe(smoothness: float) -> str:
    """Return a line on what the metasmoothness means for predictions."""
    if smoothness >= SMOOTH:
        meaning = "two equal changes of the training set have about the same effect, so effects can be predicted"
        return f"metasmoothness {smoothness:.2f}, at least {SMOOTH}: {meaning}"
    return (
        f"metasmoothness {smoothness:.2f}, below {SMOOTH}: two equal changes of the training set have different "
        "effects, so effects cannot be predicted and none were written; a smooth activation (gelu, silu), a lower "
        "learning rate, a larger batch or fewer epochs may help, as in the recipe `what_if` of experiments.yaml"
    )
