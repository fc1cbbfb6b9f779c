"""Ready experiments, and what came out of them: `recipes.yaml` → `dvc exp run`, and rows in MLflow → a table.

A recipe is a set of changes to `params.yaml`. Its runs are found by their params, not by a name: whoever trained this
state, by hand, in a queue or by this module, it counts once for each seed.
"""

import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.stages.common.overrides import PARAMS, SEED, as_options, changed, flatten, require_known
from gradtrail.stages.common.params import read_yaml, validate
from gradtrail.support.errors import UserError

PATH = Path("recipes.yaml")
_STAGE = "evaluate"  # as far as a recipe needs to run
_SECTIONS = ("fetch.", "preprocess.", "train.")  # which the row of a training shows


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Changes to the params.

    Attributes:
        about: what they are for, in a few words.
        set: key → value, such as `train.model` → `cnn`.
    """

    about: str
    set: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the runs of a recipe came to.

    Attributes:
        seeds: of the runs that were found, ascending.
        accuracies: on the test split, in the order of the seeds.
        seconds: of the training loop, where it was timed.
        num_parameters: of the network; None where there is no run.
        dataset: name of the data set.
    """

    name: str
    about: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    seconds: tuple[float, ...]
    num_parameters: int | None
    dataset: str


def read_recipes(path: Path = PATH) -> dict[str, Recipe]:
    """Read all recipes.

    Raises:
        UserError: one line that names the recipe and the key.
    """
    recipes = {name: validate(content, Recipe, f"{path}: {name}") for name, content in read_yaml(path).items()}
    for name, recipe in recipes.items():
        require_known(read_yaml(PARAMS), recipe.set, f"{path}: {name}.set")
    return recipes


def command(recipe: Recipe, seed: int | None = None) -> list[str]:
    """Return the `dvc exp run` line of a recipe: in a copy of the workspace, as far as the evaluation."""
    seeded = {} if seed is None else {SEED: seed}
    return ["dvc", "exp", "run", "--temp", *as_options({**recipe.set, **seeded}), _STAGE]


def run_recipe(name: str, seeds: Iterable[int]) -> int:
    """Run a recipe for each seed; what was run before is not run again.

    The workspace is brought up to date first: DVC ends an experiment in a fault where the cache lacks an out of it.

    Returns:
        The first exit status that is not 0.
    """
    recipe = choose(name)
    for line in [["dvc", "repro"], *(command(recipe, seed) for seed in seeds)]:
        print(f"recipe {name}: {shlex.join(line)}", file=sys.stderr)
        status = subprocess.run([sys.executable, "-m", *line], check=False).returncode
        if status:
            return status
    return 0


def choose(name: str) -> Recipe:
    """Return the recipe of that name, or raise UserError."""
    recipes = read_recipes()
    if name not in recipes:
        raise UserError(f"{PATH}: no recipe {name}; there are {', '.join(recipes)}")
    return recipes[name]


def collect_results() -> list[Result]:
    """Return what the rows in MLflow say of each recipe."""
    from gradtrail.tracking.mlflow.client import experiment_id, open_store
    from gradtrail.tracking.mlflow.tags import shown

    client, params = open_store(), read_yaml(PARAMS)
    rows = client.search_runs([experiment_id(client, "models")], "tags.stage = 'train' and metrics.`eval/accuracy` > 0")
    found = [(row.data.params, row.data.metrics) for row in rows]
    results = []
    for name, recipe in read_recipes().items():
        wanted = {key: shown(value) for key, value in flatten(changed(params, recipe.set)).items()}
        results.append(summarize(name, recipe.about, wanted, found))
    return results


def summarize(
    name: str, about: str, wanted: Mapping[str, str], rows: Sequence[tuple[Mapping[str, str], Mapping[str, float]]]
) -> Result:
    """Sum up the rows, each its params and its metrics, whose params are the wanted ones, whatever the seed."""
    trained = {key: value for key, value in wanted.items() if key.startswith(_SECTIONS) and key != SEED}
    by_seed: dict[int, Mapping[str, float]] = {}
    for params, metrics in rows:
        if trained == {key: value for key, value in params.items() if key != SEED}:
            by_seed.setdefault(int(params[SEED]), metrics)
    chosen = [by_seed[seed] for seed in sorted(by_seed)]
    return Result(
        name=name,
        about=about,
        seeds=tuple(sorted(by_seed)),
        accuracies=tuple(metrics["eval/accuracy"] for metrics in chosen),
        seconds=tuple(metrics["train/seconds"] for metrics in chosen if "train/seconds" in metrics),
        num_parameters=int(chosen[0]["train/num_parameters"]) if chosen else None,
        dataset=wanted["fetch.dataset"],
    )


def as_markdown(results: Sequence[Result]) -> str:
    """Return a table for a README; a recipe that was not run says so."""
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
    dataset = "" if result.dataset == "mnist" else f" ({result.dataset})"
    return f"| {title} | {result.num_parameters:,} | {mean}{spread} %{dataset} | {seeds} | {seconds} |"
