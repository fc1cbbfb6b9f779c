"""The recipes of `experiments.yaml`, and a table of their results from the runs in MLflow.

A recipe is a set of changes to `params.yaml`. Its runs are found by their params, not by a name: they may have been
started by hand, by a queue or by this module. Each seed counts once.
"""

import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtrail.experiments.sweep.members import read_table, seeds_trained, varies_all
from gradtrail.experiments.sweep.spec import PATH, STAGE, PlannedRun, is_recipe, trainings_of
from gradtrail.stages.common.dvc_cache import require_copies
from gradtrail.stages.common.params import (
    MEMBERS,
    PARAMS,
    SEED,
    VARY,
    active_params,
    as_options,
    changed,
    flatten,
    read_yaml,
    require_known,
    validate,
)
from gradtrail.stages.common.pipeline_file import TRAIN, StageSpec, read_pipeline, stages_before, values_of
from gradtrail.support.errors import UserError, suggestion

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Changes to the params."""

    about: str  # purpose, in a few words
    set: dict[str, Any]  # key → value, such as `train.model` → `cnn`


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of a recipe."""

    name: str
    about: str
    seeds: tuple[int, ...]  # seeds of the runs, ascending
    accuracies: tuple[float, ...]  # accuracies on the test split, in the order of the seeds
    seconds: tuple[float, ...]  # known times of the training loop
    num_parameters: int | None  # size of the network; None if there is no run
    dataset: str  # name of the data set


def read_recipes(path: Path = PATH) -> dict[str, Recipe]:
    """Read all recipes.

    Raises:
        UserError: A recipe is invalid; the message names it and the key.
    """
    recipes = {
        name: validate(content, Recipe, f"{path}: {name}")
        for name, content in read_yaml(path).items()
        if is_recipe(content)
    }
    params = read_yaml(PARAMS)
    for name, recipe in recipes.items():
        require_known(params, recipe.set, f"{path}: {name}.set")
    return recipes


def command(recipe: Recipe, seeds: range | None = None) -> list[str]:
    """Return the `dvc exp run` command of a recipe: in a copy of the workspace, up to the evaluation.

    Several seeds are the members of one training; without seeds, those of `params.yaml` are used.
    """
    seeded = {} if seeds is None else {SEED: seeds[0], MEMBERS: len(seeds)}
    return ["dvc", "exp", "run", "--temp", *as_options({**recipe.set, **seeded}), STAGE]


def list_recipes() -> int:
    """Print all recipes with their commands; return exit status 0."""
    for name, recipe in read_recipes().items():
        print(f"{name}: {recipe.about}\n    {shlex.join(command(recipe))}")
    return 0


def run_recipe(name: str, seeds: Iterable[int]) -> int:
    """Run a recipe for each seed; DVC skips what ran before.

    `dvc repro` runs first: an experiment fails if DVC's cache lacks an output of the workspace.

    Returns:
        The first exit status that is not 0.
    """
    recipe = choose(name)
    require_copies()
    runs = [PlannedRun(name, seed) for seed in seeds]
    trainings = trainings_of(runs, together=varies_all(read_yaml(PARAMS)))
    for arguments in [["dvc", "repro"], *(command(recipe, training.seeds) for training in trainings)]:
        print(f"recipe {name}: {shlex.join(arguments)}", file=sys.stderr)
        if status := subprocess.run([sys.executable, "-m", *arguments], check=False).returncode:
            return status
    return 0


def choose(name: str) -> Recipe:
    """Return the recipe of that name, or raise UserError."""
    recipes = read_recipes()
    if name not in recipes:
        raise UserError(f"{PATH}: no recipe {name}; it has {', '.join(recipes)}{suggestion(name, recipes)}")
    return recipes[name]


def collect_results() -> list[Result]:
    """Return the results of each recipe, from the runs in MLflow."""
    from gradtrail.tracking.mlflow.client import open_store
    from gradtrail.tracking.mlflow.search import StoredRuns

    client, params, pipeline = open_store(), read_yaml(PARAMS), read_pipeline()
    evaluated = [run for run in StoredRuns(client)({"stage": "train"}) if "eval/accuracy" in run.data.metrics]
    per_seed = [result for run in evaluated for result in _seed_results(client, run)]
    return [
        summarize(name, recipe.about, params_of_run(recipe, params, pipeline), per_seed)
        for name, recipe in read_recipes().items()
    ]


def params_of_run(recipe: Recipe, params: Mapping[str, Any], pipeline: Mapping[str, StageSpec]) -> dict[str, str]:
    """Return the params of a training's run with this recipe: all that it and the stages before it read."""
    from gradtrail.tracking.mlflow.tags import param_text

    values, read = changed(params, recipe.set), dict[str, Any]()
    for name in (*stages_before(TRAIN, pipeline), TRAIN):
        read |= flatten(values_of(values, pipeline[name].params.get(str(PARAMS), ()), str(PARAMS)))
    return active_params({key: param_text(value) for key, value in read.items()} | {MEMBERS: "1"})


def _seed_results(client: "MlflowClient", train: "Run") -> Iterator[tuple[dict[str, str], Mapping[str, float]]]:
    """Yield params and metrics of a training, or of each of its members as if it were a training of one seed."""
    from gradtrail.tracking.mlflow.links import PARENT

    if MEMBERS not in train.data.params or train.data.params[MEMBERS] == "1":
        yield active_params({**train.data.params, MEMBERS: "1"}), train.data.metrics
    if seeds := seeds_trained(train):
        children = (
            f"attributes.status = 'FINISHED' and tags.stage = 'evaluate' and tags.`{PARENT}` = '{train.info.run_id}'"
        )
        for evaluation in client.search_runs([train.info.experiment_id], children, max_results=1):
            for seed, metrics in read_table(client, evaluation).items():
                params = {key: value for key, value in train.data.params.items() if key != VARY}
                member = {"eval/accuracy": metrics["accuracy"]}
                member["train/num_parameters"] = train.data.metrics["train/num_parameters"]
                if "train/seconds" in train.data.metrics:
                    member["train/seconds"] = train.data.metrics["train/seconds"] / len(seeds)
                yield active_params(params | {SEED: str(seed), MEMBERS: "1"}), member


def summarize(
    name: str, about: str, expected: Mapping[str, str], runs: Sequence[tuple[Mapping[str, str], Mapping[str, float]]]
) -> Result:
    """Summarize the runs, given as pairs of params and metrics, whose params are the expected ones except the seed."""
    unseeded = {key: value for key, value in expected.items() if key != SEED}
    by_seed: dict[int, Mapping[str, float]] = {}
    for params, metrics in runs:
        if unseeded == {key: value for key, value in params.items() if key != SEED}:
            by_seed.setdefault(int(params[SEED]), metrics)
    chosen = [by_seed[seed] for seed in sorted(by_seed)]
    return Result(
        name=name,
        about=about,
        seeds=tuple(sorted(by_seed)),
        accuracies=tuple(metrics["eval/accuracy"] for metrics in chosen),
        seconds=tuple(metrics["train/seconds"] for metrics in chosen if "train/seconds" in metrics),
        num_parameters=int(chosen[0]["train/num_parameters"]) if chosen else None,
        dataset=expected["fetch.dataset"],
    )


def as_markdown(results: Sequence[Result]) -> str:
    """Return a Markdown table; the row of a recipe without runs is `not run`."""
    lines = [
        "| recipe | parameters | test accuracy, mean ± sd | seeds | training, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(_markdown_row(result) for result in results)])


def _markdown_row(result: Result) -> str:
    title = f"`{result.name}`: {result.about}"
    if not result.seeds:
        return f"| {title} | | not run | | |"
    mean = f"{100 * statistics.mean(result.accuracies):.2f}"
    spread = f" ± {100 * statistics.stdev(result.accuracies):.2f}" if len(result.seeds) > 1 else ""
    seconds = f"{statistics.median(result.seconds):.1f}" if result.seconds else ""
    seeds = ", ".join(map(str, result.seeds))
    return f"| {title} | {result.num_parameters:,} | {mean}{spread} % ({result.dataset}) | {seeds} | {seconds} |"
