"""Equal inputs give equal bytes in any environment; what may change them is refused, or part of the state.

`dvc.yaml` lists neither `support` nor `tracking`, nor the section `runtime`. So every stage is run twice: once tracked
and with the project's own settings, and once with all of them changed, under other variables, umask and `matplotlibrc`.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from projects import ROOT, Project, finished_project, warnings_in
from ruamel.yaml import YAML

from gradtrail.stages.common.pipeline_file import read_pipeline

MATPLOTLIBRC = "font.size: 20\naxes.facecolor: red\nlines.linewidth: 9\nsavefig.dpi: 50\nimage.cmap: jet\n"
VARIABLES = {
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_ENABLE_X64": "1",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_TRANSFER_GUARD": "disallow",
    "LC_ALL": "C",
    "MPLBACKEND": "svg",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Prescott",
    "OPENBLAS_NUM_THREADS": "1",
}
UMASK = ("sh", "-c", 'umask 077; exec "$@"', "sh")
PIPELINE = read_pipeline(ROOT / "dvc.yaml")
COMPUTING = [
    name for name, spec in PIPELINE.items() if "jax" in spec.params["pipeline/versions.yaml"] and name != "report"
]
FAST_MATH = "--xla_cpu_enable_fast_math=true"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A copy in another folder, with the functions that the original compiled."""
    project = finished_project().copy(tmp_path / "another folder")
    project.set("runtime.tracking", False)
    return project


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy that no test changes."""
    return finished_project().copy(tmp_path_factory.mktemp("unchanged") / "project")


@pytest.mark.parametrize("command", ["gradtrail repro --force", "pipeline.evaluate"])
def test_environment_is_refused_before_anything_changes(command: str, unchanged: Project) -> None:
    outs = [out for stage in PIPELINE for out in PIPELINE[stage].outs]
    before = unchanged.digests(*outs)
    (line,) = unchanged.python("-m", *command.split(), env={"XLA_FLAGS": FAST_MATH}, status=2).splitlines()
    assert all(part in line for part in ("XLA_FLAGS", FAST_MATH, "environment.xla_flags of params.yaml")), line
    assert unchanged.digests(*outs) == before


@pytest.mark.slow
def test_refused_environment_keeps_the_outs_that_dvc_removes(unchanged: Project) -> None:
    outs = PIPELINE["evaluate"].outs
    before = unchanged.digests(*outs)
    env = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "JAX_PLATFORMS": "cpuu"}
    output = unchanged.dvc("repro", "--force", "--single-item", "evaluate", env=env, status=255)
    assert "evaluate: JAX does not start with JAX_PLATFORMS=cpuu" in output
    assert unchanged.digests(*outs) == before


def test_xla_flag_of_params_reruns_computing_stages(project: Project) -> None:
    project.set("environment.xla_flags", ["--xla_backend_optimization_level=0", FAST_MATH])
    changed = {line.rstrip(":") for line in project.dvc("status").splitlines() if line and not line[0].isspace()}
    assert changed == {*COMPUTING, "report"}


WRITE_NO_RESULTS = {"disable_jit"}  # and says so
OTHER = {
    "steps_per_call": 7,
    "stop_after_epoch": 99,
    "checkpoint_seconds": 0.001,
    "join_seconds": 1.0,
    "download_timeout_seconds": 1.0,
    "tracking_seconds": 1.0,
    "mirrors": ["http://127.0.0.1:9/mnist"],
    "alert": "cat > /dev/null",
    "experiment": "other",
    "price_per_hour": 3.6,
    "checkify": ["nan", "div", "index"],
    "transfer_guard": "disallow",
}


@pytest.mark.slow
def test_without_tracking_and_with_every_key_of_runtime_changed_the_bytes_are_the_same(tmp_path: Path) -> None:
    project = finished_project().copy(tmp_path / "project")
    runtime = YAML(typ="safe").load(project.folder / "params.yaml")["runtime"]
    for key in runtime.keys() - WRITE_NO_RESULTS:
        assert key in OTHER or isinstance(runtime[key], bool), f"how is runtime.{key} to be changed?"
        project.set(f"runtime.{key}", OTHER.get(key, not runtime[key]))
    (project.folder / "matplotlibrc").write_text(MATPLOTLIBRC)
    shutil.rmtree(project.folder / ".gradtrail" / "xla")  # so that all is compiled anew
    runs, pipeline = len(project.runs()), read_pipeline(project.folder / "dvc.yaml")
    for stage in pipeline:
        for path in (project.folder / out for out in pipeline[stage].outs):
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
        command, env = (*UMASK, sys.executable, "-m", f"pipeline.{stage}"), {"PYTHONPATH": str(project.folder / "src")}
        process = project.start(*command, env=VARIABLES | env)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert not warnings_in(output), output
    assert "up to date" in project.dvc("status")
    assert len(project.runs()) == runs
    assert all(path.suffix == ".lock" for path in (project.folder / ".outs").iterdir())


STAGES = ("evaluate", "gradients")


def metrics_with(project: Project, processor: str) -> dict[str, float]:
    """Return what the stages measure with all instructions of the processor or some, without costs of functions."""
    project.set("environment.xla_flags", [])
    project.set("environment.processor", processor)
    values: dict[str, float] = {}
    for stage in STAGES:
        project.run_stage(stage)
        metrics = json.loads((project.folder / "results" / "metrics" / f"{stage}.json").read_text())
        values |= {f"{stage}/{key}": value for key, value in metrics.items() if not isinstance(value, str)}
    return values


@pytest.mark.nightly
def test_metrics_of_the_same_weights_agree_between_instruction_sets(tmp_path: Path) -> None:
    project = finished_project().copy(tmp_path / "project")
    project.set("runtime.tracking", False)
    project.set("train.precision", "float32")
    project.run_stage("train")
    widest, narrower = (metrics_with(project, processor) for processor in ("native", "any"))
    assert len(widest) > 10
    differing = {
        key: (value, narrower[key]) for key, value in widest.items() if not np.isclose(value, narrower[key], rtol=1e-6)
    }
    assert not differing
