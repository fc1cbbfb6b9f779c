"""Trainings on other labels than those of the data set, for the benchmarks of corrections and of label smoothing."""

import dataclasses
import time

import jax
import numpy as np

from gradtrail.core.data import Split
from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.train import loop
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.keys import keys_of
from gradtrail.core.xla.compiler import Compiler


class Trainer:
    """Trains a network on any labels of the training split, with one compilation.

    Args:
        config: of the training.
        train: the training split.
        num_classes: of the data set.
    """

    def __init__(self, config: TrainConfig, train: Split, num_classes: int):
        self._config, self._train = dataclasses.replace(config, keep_epochs=()), train
        compiler, model = Compiler(time.perf_counter), Model(config.model_config(train.images.shape[1:], num_classes))
        program = loop.make_program(self._config, model, len(train), jax.local_devices())
        self._engine = program.compile(compiler)
        self._predict = inference.compile_predict_within(model, compiler=compiler)

    def history(self, labels: np.ndarray, seed: int) -> History:
        """Return the history of a training; nothing is validated."""
        examples = loop.on_device(self._train.images, labels, self._engine.mesh)
        state = self._engine.init(keys_of(MemberSeeds.from_one(seed)))
        history = History((), on_host(state.params), self._engine.num_sampled)
        for chunk in loop.train(self._engine, state, examples, steps_per_call=self._engine.steps_per_epoch):
            history.add(chunk, on_host(self._engine.evaluation_params(chunk.state)), {"loss": 0.0, "accuracy": 0.0})
        return history

    def logits(self, history: History, split: Split) -> np.ndarray:
        """Return the logits of the trained network for a split."""
        return self._predict(history.final.params, split.images, split.labels)["logits"]
