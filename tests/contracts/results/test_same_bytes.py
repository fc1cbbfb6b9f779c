"""What cannot change an out does not: `support`, `tracking`, each key of `runtime`, and what is in the environment.

`dvc.yaml` lists neither the folders nor the section. So every stage is run twice: once tracked and with the project's
own settings, and once with all of them changed, in processes of their own that hash strings with another seed, under
the variables, the umask and the `matplotlibrc` of `strange.py`. `test_environment.py` adds one core and a cold cache.
"""

import shutil
import sys
from pathlib import Path

import pytest
from projects import finished_project
from ruamel.yaml import YAML
from strange import MATPLOTLIBRC, UMASK, VARIABLES

from gradtrail.stages.common.pipeline_file import read_pipeline

WRITE_NO_RESULTS = {"debug_nans", "disable_jit"}  # and say so
OTHER = {
    "steps_per_call": 7,
    "stream_above_mib": 0.0,
    "checkpoint_seconds": 0.001,
    "join_seconds": 1.0,
    "download_timeout_seconds": 1.0,
    "tracking_seconds": 1.0,
    "mirrors": ["http://127.0.0.1:9/mnist"],
}


@pytest.mark.slow
def test_without_tracking_and_with_every_key_of_runtime_changed_the_bytes_are_the_same(tmp_path: Path) -> None:
    project = finished_project().copy(tmp_path / "project")
    runtime = YAML(typ="safe").load(project.folder / "params.yaml")["runtime"]
    for key in runtime.keys() - WRITE_NO_RESULTS:
        assert key in OTHER or isinstance(runtime[key], bool), f"how is runtime.{key} to be changed?"
        project.set(f"runtime.{key}", OTHER.get(key, not runtime[key]))
    (project.folder / "matplotlibrc").write_text(MATPLOTLIBRC)
    runs, pipeline = len(project.runs()), read_pipeline(project.folder / "dvc.yaml")
    for stage in pipeline:
        for path in (project.folder / out for out in pipeline[stage].outs):
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
        command, env = (*UMASK, sys.executable, "-m", f"pipeline.{stage}"), {"PYTHONPATH": str(project.folder / "src")}
        process = project.start(*command, env=VARIABLES | env)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "warning" not in output
    assert "up to date" in project.dvc("status")
    assert len(project.runs()) == runs
    assert all(path.suffix == ".lock" for path in (project.folder / ".outs").iterdir())
