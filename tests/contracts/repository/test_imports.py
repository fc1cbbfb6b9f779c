"""A stage imports what it computes with, and nothing else that takes long (MLflow is for the shipper). No pickle."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from projects import ROOT, Project, environment, finished_project

from gradtrail.stages.common.pipeline_file import read_pipelines

pytestmark = pytest.mark.slow

PIPELINE = read_pipelines(ROOT)
HEAVY = {
    *("alembic", "dvc", "fastapi", "flax", "grimp", "jax", "matplotlib", "mlflow", "optax", "orbax", "pandas", "pooch"),
    *("dp_accounting", "pyarrow", "requests", "scipy", "sklearn", "sqlalchemy", "tensorstore"),
}
COMPUTES = {"flax", "jax", "optax"}
TABLES = {"pandas", "pyarrow"}
USUAL = COMPUTES | TABLES | {"matplotlib"}
MAY_IMPORT = {"fetch": {"requests"}, "preprocess": {"matplotlib"}, "report": TABLES, "privacy_audit": USUAL | {"scipy"}}
IMPORTED = "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
NO_PICKLE = """
import _pickle, pickle

def refuse(*_, **__):
    raise AssertionError("a pickle was loaded")

for module in (pickle, _pickle):
    module.load = module.loads = refuse
    module.Unpickler = type("Unpickler", (_pickle.Unpickler,), {"load": refuse})
pickle._load = pickle._loads = refuse
pickle._Unpickler.load = refuse
"""


def run_with_real_python(code: str, folder: Path, *paths: Path, status: int = 0) -> str:
    """Run code in a folder with the real interpreter, which imports `sitecustomize`; return what it printed."""
    env = environment() | {"PYTHONPATH": os.pathsep.join(map(str, (folder / "src", *paths)))}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=folder, env=env, **streams)
    assert done.returncode == status, done.stdout
    return done.stdout


def heavy_packages(line: str) -> set[str]:
    """Return the heavy packages among imported ones."""
    return set(json.loads(line)) & HEAVY


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return finished_project().copy(tmp_path_factory.mktemp("imports") / "project")


@pytest.fixture
def no_pickle(tmp_path: Path) -> Path:
    """A folder whose `sitecustomize` refuses pickles, as it is seen to."""
    (tmp_path / "sitecustomize.py").write_text(NO_PICKLE)
    loads = "import pickle, io\ntry: pickle.load(io.BytesIO(pickle.dumps(1)))\nexcept AssertionError as e: print(e)"
    assert run_with_real_python(loads, ROOT, tmp_path) == "a pickle was loaded\n"
    return tmp_path


def outs_of(stage: str, project: Project) -> dict[str, str]:
    return project.digests(*PIPELINE[stage].outs)


@pytest.mark.parametrize("stage", PIPELINE)
def test_stage_imports_only_what_it_needs(stage: str) -> None:
    imported = run_with_real_python(f"import json, sys, pipeline.{stage}; {IMPORTED}", ROOT)
    assert heavy_packages(imported) <= MAY_IMPORT.get(stage, USUAL)


@pytest.mark.parametrize("stage", ["preprocess", "gradients", "report"])  # which read all kinds of files
def test_stage_loads_no_pickle(stage: str, project: Project, no_pickle: Path) -> None:
    expected = outs_of(stage, project)
    run_with_real_python(
        f"import runpy; runpy.run_module('pipeline.{stage}', run_name='__main__')", project.folder, no_pickle
    )
    assert outs_of(stage, project) == expected


def test_resumed_training_loads_no_pickle(project: Project, no_pickle: Path, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "project")
    expected = outs_of("train", copy)
    copy.set("runtime.steps_per_call", 1)
    run = "import runpy; runpy.run_module('pipeline.train', run_name='__main__')"
    # It ends at its first step by itself: it may be over before a checkpoint in the background is.
    end = "(self.save(*progress), os.kill(os.getpid(), signal.SIGKILL))"
    patch = f"import os, signal; Checkpoints.save_if_due = lambda self, *progress: {end}"
    killed = f"from gradtrail.stages.train.checkpoints import Checkpoints; {patch}; {run}"
    assert "train: epoch 1 " not in run_with_real_python(killed, copy.folder, status=-signal.SIGKILL)
    assert "train: resuming after step 1, " in run_with_real_python(run, copy.folder, no_pickle)
    assert outs_of("train", copy) == expected


def test_repro_with_nothing_to_do_imports_nothing_heavy(project: Project) -> None:
    end = f"import atexit, json, sys; from gradtrail import cli; atexit.register(lambda: {IMPORTED})"
    repro = f"{end}; sys.argv = ['gradtrail', 'repro']; cli.main()"
    project.gradtrail("repro")  # whatever another test had left to do
    *lines, imported = run_with_real_python(repro, project.folder).splitlines()
    assert not any(line.startswith("Running stage") for line in lines)
    assert not heavy_packages(imported)


def test_shipper_starts_without_jax() -> None:
    code = f"import json, sys; import gradtrail.tracking.shipper; {IMPORTED}"
    assert not heavy_packages(run_with_real_python(code, ROOT)) & {*COMPUTES, "orbax", "dvc", "sklearn", "matplotlib"}
