"""A stage imports what it computes with, and nothing else that takes long: MLflow is imported by its tracker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from projects import ROOT, Project, environment, finished_project

pytestmark = pytest.mark.slow

HEAVY = {
    *("alembic", "dvc", "fastapi", "flax", "grimp", "jax", "matplotlib", "mlflow", "optax", "orbax", "pandas", "pooch"),
    *("pyarrow", "requests", "scipy", "sklearn", "sqlalchemy", "tensorstore"),
}
COMPUTES = {"flax", "jax", "optax"}
TABLES = {"pandas", "pyarrow"}
MAY_IMPORT = {
    "fetch": {"requests"},
    "preprocess": {"matplotlib"},
    "train": COMPUTES | TABLES | {"matplotlib"},
    "evaluate": COMPUTES | TABLES | {"matplotlib"},
    "gradients": COMPUTES | TABLES | {"matplotlib"},
    "profile": COMPUTES | TABLES | {"matplotlib"},
    "report": TABLES,
}
ONLY_WHILE_IT_RUNS = {
    "fetch": {"sklearn", "scipy", *TABLES},  # the digits are scikit-learn's, which imports the others
    "train": {"orbax", "tensorstore"},  # the checkpoint that goes to MLflow, while the tracker logs the outs
    "gradients": {"sklearn", "scipy"},  # where labels are noisy: how well their order finds the wrong ones
}
IMPORTED = "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def imported(code: str, folder: Path) -> set[str]:
    """Run code in a folder with the real interpreter; return the heavy packages that it had imported at its end."""
    env = environment() | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, stdout=subprocess.PIPE, check=True)
    return set(json.loads(done.stdout.splitlines()[-1])) & HEAVY


@pytest.mark.parametrize("stage", MAY_IMPORT)
def test_a_stage_starts_with_what_it_needs(stage: str) -> None:
    assert imported(f"import json, sys, pipeline.{stage}; {IMPORTED}", ROOT) <= MAY_IMPORT[stage]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return finished_project().copy(tmp_path_factory.mktemp("imports") / "project")


@pytest.mark.parametrize("stage", MAY_IMPORT)
def test_a_stage_imports_no_more_while_it_runs(stage: str, project: Project) -> None:
    run = f"import json, runpy, sys; runpy.run_module('pipeline.{stage}', run_name='__main__'); {IMPORTED}"
    assert imported(run, project.folder) <= MAY_IMPORT[stage] | ONLY_WHILE_IT_RUNS.get(stage, set())


def test_a_tracker_starts_without_jax() -> None:
    code = f"import json, sys; from gradtrail.tracking.mlflow import tracker; tracker._import_mlflow(); {IMPORTED}"
    assert not imported(code, ROOT) & {*COMPUTES, "orbax", "dvc", "sklearn", "matplotlib"}
