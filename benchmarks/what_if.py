"""Whether the predicted effects of removing training examples are those of trainings without them, and what they cost.

    python -m benchmarks.what_if [--subsets 50] [--outputs 20]

Tables, on the data of `data/processed`, each row in a process of its own:

- costs: the derivative of one output and of eight at once, in trainings, and the memory by which the process grew;
- checks: for random subsets of 1 %, 5 % and 50 %, the rank correlation over the subsets of predicted and real change of
  a margin (LDS), mean over the outputs; beside TracIn and influence functions by conjugate gradients;
- mistakes: how many of 20, spread evenly over their margins, are corrected by removing the 0.1 % of the examples that
  each method names, or as many at random;
- metasmoothness beside LDS, for ten trainings.

Retrainings have the batches of the first training, with the weight 0 for what is removed. It takes about an hour and a
quarter on two cores and wants them for itself.
"""

import argparse
import dataclasses
import functools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from benchmarks.record import read_results, record
from gradtrail.core.gradients.metagradient import Metagradient, compile_metagradient
from gradtrail.core.gradients.what_if import metasmoothness
from gradtrail.core.nn.losses import log_odds
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train.config import MemberSeeds, TrainConfig
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import on_device
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common.params import PARAMS, changed, validate
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data import data_files
from gradtrail.stages.what_if import choose_examples
from gradtrail.support.progress import progress_bar

WHAT_IF = {"train.mlp.activation": "silu", "train.adamw.learning_rate": 0.003, "train.batch_size": 512}
TRAININGS = {
    "what_if": WHAT_IF,
    "default": {},
    "default, GELU": {"train.mlp.activation": "gelu"},
    "default, tanh": {"train.mlp.activation": "tanh"},
    "ReLU": WHAT_IF | {"train.mlp.activation": "relu"},
    "GELU": WHAT_IF | {"train.mlp.activation": "gelu"},
    "rate 0.005": WHAT_IF | {"train.adamw.learning_rate": 0.005},
    "rate 0.01": WHAT_IF | {"train.adamw.learning_rate": 0.01},
    "batch 256": WHAT_IF | {"train.batch_size": 256},
    "momentum SGD": WHAT_IF | {"train.optimizer": "sgd", "train.sgd.learning_rate": 0.1},
}
FRACTIONS = (0.01, 0.05, 0.5)
SHARE = 0.001  # of the training examples that may be removed to correct a mistake
DAMPING, ITERATIONS, SAMPLE = 1e-2, 50, 5_000  # of the influence functions
BATCH = 1_000


class Problem:
    """A training, its data, and the outputs to explain."""

    def __init__(self, changes: dict[str, Any], memory_mib: int, test: np.ndarray | None, outputs: int):
        config = validate(changed(read_yaml(PARAMS), changes)["train"], TrainConfig, "train")
        splits = data_files.read_splits(Path("data/processed"))
        info = data_files.read_info(Path("data/processed"))
        self.config, self.model = config, Model(config.model_config(info.image_shape, info.num_classes))
        self.train_split, self.test = splits["train"], splits["test"]
        self.num_examples, self.num_classes = len(self.train_split), info.num_classes
        self.rows = np.random.default_rng(1).choice(len(self.test), outputs, replace=False) if test is None else test
        started = time.perf_counter()
        self.metagradient: Metagradient = compile_metagradient(
            config,
            self.model,
            self.num_examples,
            self.margins_of(self.rows),
            memory_bytes=memory_mib * 2**20,
            compiler=Compiler(time.perf_counter),
        )
        self.compile_seconds = time.perf_counter() - started
        self.examples = on_device(self.train_split.images, self.train_split.labels, self.metagradient.training.mesh)
        self.keys = keys_of(MemberSeeds.from_one(config.seed))
        self.all_margins = jax.jit(self.margins_of(np.arange(len(self.test))))

    def margins_of(self, rows: np.ndarray) -> Any:
        images, labels = jnp.asarray(self.test.images[rows]), jnp.asarray(self.test.labels[rows])

        def margins(params: Params) -> jax.Array:
            return log_odds(self.model.apply(params, images), labels)

        return margins

    def at(self, changes: np.ndarray) -> Any:
        return dataclasses.replace(self.examples, weight_changes=jnp.asarray(changes, jnp.float32))

    def without(self, removed: np.ndarray, share: float = 1.0) -> np.ndarray:
        changes = np.zeros((self.num_examples, self.num_classes), np.float32)
        changes[removed, self.train_split.labels[removed]] = -share
        return changes

    def trained(self, changes: np.ndarray) -> Params:
        return self.metagradient.train(self.keys, self.at(changes)).params

    def margins(self, changes: np.ndarray) -> np.ndarray:
        """Return the margins of all test examples after a training."""
        return np.asarray(self.all_margins(self.trained(changes)))

    @functools.cached_property
    def logits(self) -> jax.Array:
        """The logits of all test examples, without changes."""
        return jax.jit(self.model.apply)(self.trained(self.without(np.array([], int))), jnp.asarray(self.test.images))

    @property
    def predicted(self) -> np.ndarray:
        return np.asarray(self.logits).argmax(axis=1)

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.predicted == self.test.labels))

    @property
    def unchanged_margins(self) -> np.ndarray:
        return np.asarray(log_odds(self.logits, jnp.asarray(self.test.labels)))

    def derivative(self) -> np.ndarray:
        """Return the predicted change of each output without each example."""
        examples = self.at(self.without(np.array([], int)))
        _, derivative = self.metagradient.derivative([*self.metagradient.states(self.keys, examples)], examples)
        return -derivative[:, np.arange(self.num_examples), self.train_split.labels]

    def products(self, params: Params, directions: Params) -> np.ndarray:
        """Return the inner products of directions, a pytree with a leading axis, with the gradient of each example."""

        @jax.jit
        def of_batch(params: Params, directions: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
            def loss(params: Params) -> jax.Array:
                logits = self.model.apply(params, images)
                return self.config.loss.per_example(logits, labels)

            return jax.vmap(lambda direction: jax.jvp(loss, (params,), (direction,))[1])(directions)

        split, columns = self.train_split, []
        for start in range(0, self.num_examples, BATCH):
            part = split[slice(start, start + BATCH)]
            columns.append(np.asarray(of_batch(params, directions, part.images, part.labels)))
        return np.concatenate(columns, axis=1)


def tracin(problem: Problem, rows: np.ndarray) -> np.ndarray:
    """Return TracIn's predictions: the products of gradients at the end of each epoch, times the learning rate."""
    training = problem.metagradient.training
    states = [*problem.metagradient.states(problem.keys, problem.at(problem.without(np.array([], int))))]
    rate = problem.config.optimizer.rate(problem.config.schedule, training.num_steps)
    total = np.zeros((len(rows), problem.num_examples))
    for epoch in range(1, problem.config.epochs + 1):
        step = min(epoch * training.steps_per_epoch, training.num_steps)
        params = states[min(round(step / problem.metagradient.steps_per_part), len(states) - 1)].params
        gradients = jax.jit(jax.jacrev(problem.margins_of(rows)))(params)
        total += float(rate(step - 1)) / problem.config.batch_size * problem.products(params, gradients)
    return total


def influence_functions(problem: Problem, rows: np.ndarray) -> np.ndarray:
    """Return the predictions of influence functions, with the Gauss-Newton matrix of a sample, and damping."""
    params = problem.trained(problem.without(np.array([], int)))
    some = np.random.default_rng(0).choice(problem.num_examples, SAMPLE, replace=False)
    images = jnp.asarray(problem.train_split.images[some])

    @jax.jit
    def solve(params: Params, images: jax.Array, gradient: Params) -> Params:  # constants would be folded for minutes
        def apply(params: Params) -> jax.Array:
            return problem.model.apply(params, images)

        def matrix_times(vector: Params) -> Params:
            logits, moved = jax.jvp(apply, (params,), (vector,))
            share = jax.nn.softmax(logits)
            curved = share * (moved - jnp.sum(share * moved, axis=1, keepdims=True)) / SAMPLE
            back = jax.vjp(apply, params)[1](curved)[0]
            return jax.tree.map(lambda leaf, damped: leaf + DAMPING * damped, back, vector)

        return jax.scipy.sparse.linalg.cg(matrix_times, gradient, maxiter=ITERATIONS)[0]

    gradients = jax.jit(jax.jacrev(problem.margins_of(rows)))(params)
    by_row = [jax.tree.map(lambda leaf, row=row: leaf[row], gradients) for row in range(len(rows))]
    solved = [solve(params, images, gradient) for gradient in by_row]
    directions = jax.tree.map(lambda *leaves: jnp.stack(leaves), *solved)
    return problem.products(params, directions) / problem.num_examples


METHODS = {"TracIn": tracin, "influence functions": influence_functions}


def rank_correlations(predicted: np.ndarray, real: np.ndarray) -> list[float]:
    """Return the Spearman correlation over the subsets, (subsets, outputs), of each output."""
    return [float(stats.spearmanr(predicted[:, k], real[:, k])[0]) for k in range(real.shape[1])]


def subset(problem: Problem, fraction: float, seed: int) -> np.ndarray:
    size = round(fraction * problem.num_examples)
    return np.random.default_rng(seed).choice(problem.num_examples, size, replace=False)


def measure_costs(task: dict[str, Any]) -> dict[str, Any]:
    """Return the time of a derivative in trainings, and the memory by which the process grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problem = Problem(task["changes"], task["memory_mib"], None, task["outputs"])
    nothing = problem.without(np.array([], int))
    jax.block_until_ready(problem.trained(nothing))
    trainings, derivatives = [], []
    for _ in range(task["rounds"]):
        started = time.perf_counter()
        jax.block_until_ready(problem.trained(nothing))
        trainings.append(time.perf_counter() - started)
        started = time.perf_counter()
        problem.derivative()
        derivatives.append(time.perf_counter() - started)
    return {
        "train_seconds": float(np.median(trainings)),
        "derivative_in_trainings": float(np.median(np.array(derivatives) / np.array(trainings))),
        "grown_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "steps": problem.metagradient.training.num_steps,
        "steps_per_part": problem.metagradient.steps_per_part,
        "compile_seconds": problem.compile_seconds,
    }


def measure_smoothness(task: dict[str, Any]) -> dict[str, Any]:
    """Return metasmoothness and LDS of a training."""
    problem = Problem(task["changes"], task["memory_mib"], None, task["outputs"])
    base = problem.unchanged_margins
    predictions = problem.derivative()
    removed = [subset(problem, 0.01, 100 + seed) for seed in range(task["subsets"])]
    real = np.array([problem.margins(problem.without(ids))[problem.rows] - base[problem.rows] for ids in removed])
    predicted = np.array([predictions[:, ids].sum(axis=1) for ids in removed])
    return {
        "test_accuracy": problem.accuracy,
        "metasmoothness": metasmoothness(
            base, problem.margins, [problem.without(subset(problem, 0.01, s)) for s in range(2)]
        ),
        "lds": float(np.mean(rank_correlations(predicted, real))),
    }


def measure_checks(task: dict[str, Any]) -> dict[str, Any]:
    """Return LDS by fraction and method, and how many mistakes each method corrects."""
    problem = Problem(task["changes"], task["memory_mib"], None, task["outputs"])
    base = problem.unchanged_margins
    predictions = {"derivative": problem.derivative()}
    predictions |= {name: method(problem, problem.rows) for name, method in METHODS.items()}
    result: dict[str, Any] = {"test_accuracy": problem.accuracy, "lds": {name: {} for name in predictions}}
    for fraction in FRACTIONS:
        removed = [subset(problem, fraction, 100 + seed) for seed in range(task["subsets"])]
        real = np.array([problem.margins(problem.without(ids))[problem.rows] - base[problem.rows] for ids in removed])
        for name, effects in predictions.items():
            predicted = np.array([effects[:, ids].sum(axis=1) for ids in removed])
            each = rank_correlations(predicted, real)
            result["lds"][name][str(fraction)] = {"mean": float(np.mean(each)), "least": min(each)}
    return result


def measure_mistakes(task: dict[str, Any]) -> dict[str, Any]:
    """Return how many mistakes are corrected without the 0.1 % of the examples that each method names."""
    problem = Problem(task["changes"], task["memory_mib"], None, 1)
    margins, is_mistake = problem.unchanged_margins, problem.predicted != problem.test.labels
    mistakes = choose_examples(margins, is_mistake, task["mistakes"])
    of_mistakes = Problem(task["changes"], task["memory_mib"], mistakes, 0)
    size = round(SHARE * problem.num_examples)
    random = np.random.default_rng(0).normal(size=(len(mistakes), problem.num_examples))
    effects = {"random": random, "derivative": of_mistakes.derivative()}
    effects |= {name: method(of_mistakes, mistakes) for name, method in METHODS.items()}
    corrected = {
        name: sum(
            bool(problem.margins(problem.without(np.argsort(row)[-size:]))[mistake] > 0)
            for row, mistake in zip(rows, mistakes, strict=True)
        )
        for name, rows in effects.items()
    }
    return {
        "mistakes": len(mistakes),
        "of": int(is_mistake.sum()),
        "removed": size,
        "margins": margins[mistakes].tolist(),
    } | corrected


TASKS = {
    "costs": measure_costs,
    "checks": measure_checks,
    "mistakes": measure_mistakes,
    "smoothness": measure_smoothness,
}


def in_process(kind: str, **task: Any) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.what_if", "--task", json.dumps({"kind": kind, **task})]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def print_rows(title: str, rows: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title)
    table.add_column("training")
    for name in next(iter(rows.values())):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    """Measure, print the tables, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subsets", type=int, default=50)
    parser.add_argument("--outputs", type=int, default=20)
    parser.add_argument("--only", choices=TASKS, help="measure this, and keep the other results of the file")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        own = json.loads(options.task)
        print(json.dumps(TASKS[own.pop("kind")](own)))
        return
    results: dict[str, Any] = read_results("what_if") if options.only else {}
    with progress_bar("what if", 5 + len(TRAININGS), unit="steps") as bar:
        if options.only in (None, "costs"):
            settings = {
                "what_if, 1 output": (WHAT_IF, 1),
                "what_if, 8 outputs": (WHAT_IF, 8),
                "default, 1 output": ({}, 1),
            }
            results["costs"] = {}
            for name, (changes, outputs) in settings.items():
                bar.advance(message=name)
                task: Any = {"changes": changes, "outputs": outputs, "memory_mib": 1024, "rounds": 3}
                results["costs"][name] = in_process("costs", **task)
            print_rows("costs", results["costs"])
        if options.only in (None, "checks"):
            bar.advance(message="checks")
            task = {"changes": WHAT_IF, "outputs": options.outputs, "subsets": options.subsets, "memory_mib": 1024}
            results["checks"] = in_process("checks", **task)
            Console().print_json(data=results["checks"])
        if options.only in (None, "mistakes"):
            bar.advance(message="mistakes")
            results["mistakes"] = in_process("mistakes", changes=WHAT_IF, mistakes=20, memory_mib=1024)
            Console().print_json(data=results["mistakes"])
        if options.only in (None, "smoothness"):
            results["smoothness"] = {}
            for name, training in TRAININGS.items():
                bar.advance(message=name)
                task = {"changes": training, "outputs": 10, "subsets": 20, "memory_mib": 1024}
                results["smoothness"][name] = in_process("smoothness", **task)
                print(name, json.dumps(results["smoothness"][name]), flush=True)
            rows = list(results["smoothness"].values())
            both = [[row[name] for row in rows] for name in ("metasmoothness", "lds")]
            results["rank_correlation"] = float(stats.spearmanr(*both)[0])
            print_rows(f"rank correlation {results['rank_correlation']:.2f}", results["smoothness"])
    record("what_if", results, options)


if __name__ == "__main__":
    main()
