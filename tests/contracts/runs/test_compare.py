"""`gradtrail compare` with DVC's queue and MLflow: what is missing is run, once, whatever came in between."""

import contextlib
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from projects import Project
from ruamel.yaml import YAML
from small_project import make_small_project

LR = "train.adamw.learning_rate"
_EDITS = {
    "train": [
        ("import functools\n", "import functools\nfrom gradtrail.stages.common.yaml_file import read_yaml\n"),
        ("str(value)[:4]", "f\"{value} {read_yaml(Path('params.yaml'))['train']['seed']}\""),
        (
            "        words =",
            "        if value == 0.5:\n            raise SystemExit('a rate too high')\n        words =",
        ),
    ],
    "evaluate": [('"length"', '"accuracy": 0.9 + len(set(words[0])) / 1000, "loss": 0.5, "length"')],
}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """The small project with a figure to compare, a rate that fails, and comparisons of rates."""
    project = make_small_project(tmp_path / "project")
    for stage, edits in _EDITS.items():
        path = project.folder / "pipeline" / f"{stage}.py"
        text = path.read_text()
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
    rates = {"low": {LR: 0.01}, "high": {LR: 0.02}}
    comparisons = {
        "rates": {"about": "which rate?", "seeds": [0, 1], "variants": rates, "timed": True},  # so one seed at a time
        "faulty": {"seeds": [0], "variants": {"low": {LR: 0.01}, "too high": {LR: 0.5}}},
    }
    YAML().dump(comparisons, project.folder / "experiments.yaml")
    project.commit("comparisons")
    yield project
    for worker in project.processes("queue-worker"):
        worker.kill()


def command(*arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", "gradtrail", "compare", *arguments


def compare(project: Project, *arguments: str) -> str:
    return project.gradtrail("compare", *arguments)


def experiments(project: Project) -> int:
    """Return how many experiments DVC keeps."""
    refs = project.git("for-each-ref", "--format=%(refname)", "refs/exps").splitlines()
    return sum(ref.count("/") == 4 for ref in refs)


def trained(project: Project) -> Counter[tuple[str, str]]:
    """Return how often each rate and seed of the comparison was trained."""
    runs = [run for run in project.runs_of("train") if run["params"][LR] != "0.005"]
    return Counter({(run["params"][LR], run["params"]["train.seed"]): int(run["tags"]["attempts"]) for run in runs})


def once(*seeds: str) -> dict[tuple[str, str], int]:
    return {(rate, seed): 1 for rate in ("0.01", "0.02") for seed in seeds}


@pytest.mark.nightly
def test_only_what_is_missing_is_run(project: Project) -> None:
    first = compare(project, "rates")
    assert re.search(
        r"rates: (low|high), seed 0: done \(1 of 4\)\n(.*\n)*rates: (low|high), seed 1: done \(4 of 4\)", first
    )
    assert trained(project) == once("0", "1")
    assert experiments(project) == 4
    assert {path.suffix for path in (project.folder / "results/comparisons").iterdir()} == {".png", ".csv", ".md"}
    assert "done (" not in compare(project, "rates")

    third = compare(project, "rates", "--seeds", "2,1,0")
    assert third.count("seed 2: done") == third.count(": done (") == 2
    assert trained(project) == once("0", "1", "2")

    with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as store, store:
        params = {LR: "0.02", "train.seed": "1"}.items()
        (lost,) = (run["id"] for run in project.runs_of("train") if params <= run["params"].items())
        store.execute("update runs set lifecycle_stage = 'deleted' where run_uuid = ?", (lost,))
    output = project.gradtrail("compare", "rates", status=1)
    assert "high, seed 1: has no run in MLflow; `gradtrail sync --restore RUN` brings back" in output
    project.gradtrail("sync", "--restore", lost)
    assert "done (" not in compare(project, "rates")

    (project.folder / "src/gradtrail/core/second.py").write_text("WORD = 'changed'\n")
    assert "low, high: 0 of 4 runs done; 4 trainings to run" in compare(project), "what other code made does not count"


@pytest.mark.nightly
def test_interrupted_comparison_continues_and_a_failed_run_is_named(project: Project) -> None:
    env = {"PYTHONPATH": str(project.folder / "src")}
    process = project.start(*command("faulty"), env=env)
    deadline = time.monotonic() + 200
    while not project.processes("exec-run") and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "DVC's queue keeps running: `dvc queue status` shows it, `dvc queue stop --kill` stops it" in output

    both = [project.start(*command("faulty"), env=env) for _ in range(2)]
    outputs = [other.communicate(timeout=300)[0] for other in both]
    assert [other.returncode for other in both] == [1, 1], outputs
    assert sum("waiting for another comparison" in output for output in outputs) == 1
    assert any("experiments queued before: " in output for output in outputs)
    assert trained(project)[("0.01", "0")] == 1
    assert experiments(project) == 1
    name = re.findall(r"^too high, seed 0: failed; `dvc queue logs (.+)` shows why$", outputs[0], flags=re.MULTILINE)[0]
    assert "a rate too high" in project.dvc("queue", "logs", name)
