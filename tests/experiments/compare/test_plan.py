"""Which MLflow runs count as a run of a comparison: those where DVC would find nothing to do, and no others."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag
from ruamel.yaml import YAML

from gradtrail.core.train.config import VARIED
from gradtrail.experiments import estimate
from gradtrail.experiments.compare import plan
from gradtrail.experiments.compare.plan import CompletedRun, Planner, trainings_of
from gradtrail.experiments.compare.spec import Comparison
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.tracking.state import WorkingState
from gradtrail.tracking.tags import OUTS, output_tags, outputs, param_text, state_tags

STAGES = {
    "fetch": ([], "data/raw"),
    "train": (["data/raw/part.txt"], "models.txt"),
    "evaluate": (["models.txt"], "results.txt"),
}
PARAMS = {
    "fetch": {"noise": 0.0},
    "train": {"seed": 0, "members": 1, "vary": [*VARIED], "rate": 0.5},
    "evaluate": {"bins": 5},
    "runtime": {"trace": False},
}
RATES = Comparison(
    name="rates",
    about="",
    seeds=(0, 1),
    variants={"low": {"train.rate": 0.5}, "high": {"train.rate": 0.9}},
)
NOISES = dataclasses.replace(RATES, seeds=(0,), variants={"none": {"fetch.noise": 0.0}, "some": {"fetch.noise": 0.1}})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline, in which the tests play its stages: each writes a digest of what it reads."""
    monkeypatch.chdir(tmp_path)
    stages = {
        name: {
            "cmd": f"run {name}",
            "deps": [*reads, f"{name}.py"],
            "params": [name, {"pipeline/versions.yaml": ["jax"]}],
            "outs": [out],
        }
        for name, (reads, out) in STAGES.items()
    }
    YAML().dump({"stages": stages}, tmp_path / "dvc.yaml")
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/versions.yaml").write_text('jax: "1.0"\n')
    write_params(PARAMS)
    for name in STAGES:
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
    return tmp_path


def write_params(params: Mapping[str, Any]) -> None:
    YAML().dump(dict(params), Path("params.yaml"))


class Store:
    """MLflow runs in memory, as played stages would log them."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def __call__(self, tags: Mapping[str, str], *, finished: bool = False) -> list[Run]:
        fitting = (run for run in reversed(self.runs) if tags.items() <= run.data.tags.items())
        return [run for run in fitting if not finished or run.info.status == "FINISHED"]

    def run(self, accuracy: float = 0.9, *, until: str = "evaluate", status: str = "FINISHED", **changes: Any) -> None:
        """Run the pipeline; in `changes` a double underscore stands for a dot."""
        saved_params = read_yaml(Path("params.yaml"))
        params = {section: dict(values) for section, values in saved_params.items()}
        for key, value in changes.items():
            section, name = key.split("__")
            params[section][name] = value
        write_params(params)
        names = list(STAGES)
        for stage in names[: names.index(until) + 1]:
            self.runs.append(played(stage, accuracy, status if stage == until else "FINISHED", len(self.runs)))
        write_params(saved_params)


def played(name: str, accuracy: float, status: str, number: int) -> Run:
    """Write a stage's out, and return the run that it would log."""
    reads, out = STAGES[name]
    content = f"{read_yaml(Path('params.yaml'))[name]} {[Path(dep).read_text() for dep in reads]}"
    if name == "fetch":
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "part.txt").write_text(content)
        put_into_cache(Path(out))
    else:
        Path(out).write_text(content)
    stage = WorkingState(name)
    tags = state_tags(stage) | output_tags(stage, {out: digest(Path(out))}) | {"dataset": "words"}
    tags |= {"dataset_digest": hashlib.sha256(b"").hexdigest()}
    metrics = {
        "train": {"train/seconds": float(number), "train/cost": 3.0 * number, "train/num_parameters": 7.0},
        "evaluate": {"eval/accuracy": accuracy, "eval/loss": 1 - accuracy},
    }.get(name, {})
    info = RunInfo(
        run_id=f"{number:032x}",
        experiment_id="1",
        user_id="",
        status=status,
        start_time=number,
        end_time=number,
        lifecycle_stage="active",
    )
    params = read_yaml(Path("params.yaml"))["train"]
    data = RunData(
        params=[Param(f"train.{key}", param_text(value)) for key, value in params.items()],
        metrics=[Metric(key, value, 0, 0) for key, value in metrics.items()],
        tags=[RunTag(key, value) for key, value in tags.items()],
    )
    return Run(info, data)


def put_into_cache(out: Path) -> None:
    """Put the listing of a folder where DVC keeps it."""
    md5 = digest(out)
    place = Path(".dvc/cache/files/md5") / md5[:2] / md5[2:]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps([{"md5": digest(path), "relpath": path.name} for path in sorted(out.iterdir())]))


def members_of(evaluation: Run) -> dict[int, dict[str, float]]:
    """The metrics of the members; see `Store.run`."""
    mean, params = evaluation.data.metrics["eval/accuracy"], evaluation.data.params
    first, count = int(params["train.seed"]), int(params["train.members"])
    return {seed: {"accuracy": mean + seed / 1000, "loss": 1 - mean} for seed in range(first, first + count)}


def completed(store: Store, comparison: Comparison = RATES) -> dict[tuple[str, int], CompletedRun]:
    results = Planner(store, members_of).completed(comparison)
    return {(result.variant, result.seed): result for result in results}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([], {}),
        (
            [{"accuracy": 0.91}, {"train__rate": 0.9, "train__seed": 1}, {"train__rate": 0.7}, {"train__seed": 2}],
            {("low", 0): 0.91, ("high", 1): 0.9},
        ),
        ([{"until": "train"}, {"train__rate": 0.9, "status": "KILLED"}], {}),
        ([{"accuracy": 0.8, "fetch__noise": 0.1}], {}),  # of other data
        (  # members of a training count as runs of their seeds, unless they share random numbers
            [
                {"train__members": 2},
                {"train__rate": 0.9, "train__members": 2, "train__vary": ["order"]},
                {"accuracy": 0.7, "train__rate": 0.9, "train__seed": 1, "train__members": 3},
            ],
            {("low", 0): 0.9, ("low", 1): 0.901, ("high", 1): 0.701},
        ),
        ([{"train__members": 2}, {"accuracy": 0.95, "train__seed": 1}], {("low", 0): 0.9, ("low", 1): 0.95}),
    ],
    ids=["none", "params", "unfinished", "data", "members", "alone before members"],
)
def test_completed_runs_are_those_whose_params_and_data_are_planned(
    runs: list[dict[str, Any]], expected: dict[tuple[str, int], float]
) -> None:
    store = Store()
    for run in runs:
        store.run(**run)
    results = completed(store)
    assert {run: result.test_accuracy for run, result in results.items()} == pytest.approx(expected)


def test_completed_run_has_the_metrics_of_its_runs() -> None:
    store = Store()
    store.run(0.91, train__members=2)
    low = completed(store)[("low", 1)]
    assert (low.test_loss, low.train_seconds, low.dataset) == (pytest.approx(0.09), 0.5, "words e3b0c442")
    assert low.cost == 1.5, "the share of a member"
    assert low.mlflow_run == store.runs[1].info.run_id, "the training's"


def test_training_is_found_without_its_evaluation() -> None:
    store = Store()
    store.run(until="train")
    store.run(until="train", train__rate=0.9, status="FAILED")
    planner = Planner(store, members_of)
    own = store.runs[1]
    tags = own.data.tags | {OUTS: json.dumps(dict.fromkeys(outputs(own.data.tags), "0" * 32))}
    elsewhere = Run(own.info, RunData(tags=[RunTag(*tag) for tag in tags.items()]))
    store.runs.append(elsewhere)
    planner = Planner(store, members_of)
    for run in (own, elsewhere):
        assert planner.training({"train.rate": 0.5}, lambda found, run=run: found is run) is run
    assert planner.training({"train.rate": 0.9}, lambda _: True) is None
    assert planner.training({"fetch.noise": 0.1}, lambda _: True) is None
    assert planner.completed(RATES) == []


def test_missing_trainings_take_what_the_most_similar_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "machine_key", lambda: "mine")
    write_params({**PARAMS, "train": {**PARAMS["train"], "model": "linear"}})
    store = Store()
    for rate, model, machine in ((0.5, "linear", "mine"), (0.9, "linear", "mine-H100"), (0.9, "own", "mine")):
        store.run(train__rate=rate, train__model=model, train__seed=1)
        store.runs[-2].data.tags["machine"] = machine
    store.run(train__rate=0.9)
    store.runs[-2].data.tags["machine"] = "another"
    planner = Planner(store, members_of)
    for changes, expected in (
        ({"train.rate": 0.9, "train.seed": 1}, (4.0, f"{4:032x}"[:8])),
        ({"train.rate": 0.5}, (1.0, "00000000 with train.seed 1")),
        ({"train.model": "own", "train.rate": 0.9}, (7.0, "00000000 with train.seed 1")),
    ):
        seconds, earlier = planner.seconds(changes) or (None, None)
        assert (seconds, str(earlier)) == expected
    store.runs = []
    assert Planner(store, members_of).seconds({}) is None


def test_constant_of_all_random_choices_is_that_of_the_training() -> None:
    assert {*VARIED} == plan._VARIED


def test_members_do_not_count_if_times_matter_or_the_params_share_random_numbers() -> None:
    store = Store()
    store.run(0.9, train__members=2)
    assert completed(store, dataclasses.replace(RATES, timed=True)) == {}
    write_params({**PARAMS, "train": {**PARAMS["train"], "vary": ["order"]}})
    store.run(0.8, train__members=2)
    assert completed(store, RATES) == {}


def test_locked_stage_before_training_needs_no_run(folder: Path) -> None:
    """Code of `fetch` was edited and its outs are the same: its run of before stands for both, and DVC runs nothing."""
    store = Store()
    store.run(0.9)
    entry, out = WorkingState("fetch").entry("fetch"), STAGES["fetch"][1]
    store.runs = [run for run in store.runs if run.data.tags["stage"] != "fetch"]
    assert completed(store) == {}
    section = {
        "cmd": entry.cmd,
        "deps": [{"path": path, "md5": md5} for path, md5 in entry.deps.items()],
        "params": entry.params,
        "outs": [{"path": out, "md5": digest(Path(out))}],
    }
    YAML().dump({"schema": "2.0", "stages": {"fetch": section}}, folder / "dvc.lock")
    assert list(completed(store)) == [("low", 0)]
    (folder / "fetch.py").write_text("# another")
    assert completed(store) == {}


@pytest.mark.parametrize("name", ["fetch.py", "train.py", "evaluate.py", "pipeline/versions.yaml"])
def test_run_of_other_code_or_versions_does_not_count(name: str) -> None:
    store = Store()
    store.run()
    before = Path(name).read_text()
    Path(name).write_text('jax: "1.1"\n' if name.endswith("yaml") else "# edited\n")
    assert completed(store) == {}
    Path(name).write_text(before)
    assert list(completed(store)) == [("low", 0)]


def test_data_are_traced_through_upstream_stages() -> None:
    store = Store()
    store.run(0.9)
    store.run(0.8, fetch__noise=0.1)
    assert [result.test_accuracy for result in completed(store, NOISES).values()] == [0.9, 0.8]


def test_executed_run_is_preferred_to_a_rebuilt_one() -> None:
    store = Store()
    store.run()
    store.run()
    rebuilt = store.runs[-2]
    rebuilt.data.tags["rebuilt"] = "true"
    assert completed(store)[("low", 0)].train_seconds == 1.0
    store.runs[1].data.tags["rebuilt"] = "true"
    assert completed(store)[("low", 0)].train_seconds == 4.0


def test_incomplete_newer_training_does_not_hide_a_complete_one() -> None:
    """As on another kind of machine, whose evaluation has not run yet."""
    store = Store()
    store.run(0.91)
    older = store.runs[1].info.run_id
    store.runs.append(played("train", 0.0, "FINISHED", 9))
    store.runs[-1].data.tags.update(output_tags(WorkingState("train"), {"models.txt": "0" * 32}))
    results = completed(store)[("low", 0)]
    assert (results.mlflow_run, results.test_accuracy) == (older, 0.91)
    store.runs.append(played("evaluate", 0.95, "FINISHED", 10))
    assert completed(store)[("low", 0)].mlflow_run == older, "no evaluation has read the newer outs"


def test_trainings_are_ordered_by_seed_with_variants_in_a_fixed_random_order() -> None:
    comparison = Comparison(name="letters", seeds=tuple(range(20)), variants={variant: {} for variant in "abcdef"})
    trainings = trainings_of(comparison, comparison.runs, together=False)
    assert {*trainings} == {f"{variant}, seed {seed}" for variant, seed in comparison.runs}
    seeds = [changes["train.seed"] for changes in trainings.values()]
    assert seeds == sorted(seeds)
    assert [*trainings] == [*trainings_of(comparison, reversed(comparison.runs), together=False)]
    firsts = [*trainings][::6]
    assert len({label[0] for label in firsts}) > 3, "no variant is always the first"


def test_consecutive_seeds_of_a_variant_are_one_training() -> None:
    comparison = Comparison(name="letters", variants={"a": {"train.rate": 1}, "b": {}})
    runs = [*(("a", seed) for seed in (4, 0, 1, 7, 2)), ("b", 3)]
    trainings = trainings_of(comparison, runs, together=True)
    assert sorted(trainings) == ["a, seed 4", "a, seed 7", "a, seeds 0 to 2", "b, seed 3"]
    assert trainings["a, seeds 0 to 2"] == {"train.rate": 1, "train.seed": 0, "train.members": 3}
