"""`runtime.trace` records every stage that computes, changes no byte and leaves nothing behind, however it ends."""

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import jax
import pytest
from projects import Project, finished_project, stop

from gradtrail.stages.common.pipeline_file import read_pipeline

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished project, in which tracing is then switched on."""
    project = finished_project().copy(tmp_path_factory.mktemp("traced") / "project")
    project.set("runtime.trace", True)
    return project


def traces_of(project: Project, stage: str) -> list[Path]:
    (run,) = project.runs_of(stage)
    return sorted(run["artifacts"].glob("trace/plugins/profile/*"))


def functions_of(run: dict[str, Any]) -> set[str]:
    return {path.name.removesuffix(".hlo.txt") for path in run["artifacts"].glob("compile/*.hlo.txt")}


@pytest.mark.parametrize("stage", ["preprocess", "gradients"])
def test_stage_is_traced_and_writes_the_same_bytes(stage: str, project: Project) -> None:
    outs = read_pipeline(project.folder / "dvc.yaml")[stage].outs
    before = project.digests(*outs)
    under = ("env",) if stage == "preprocess" else ()  # the real interpreter, which has not imported JAX
    output = project.run_stage(stage, *under)
    assert project.digests(*outs) == before
    assert "warning" not in output
    assert all(path.suffix == ".lock" for path in (project.folder / ".outs").iterdir())
    (run,) = project.runs_of(stage)
    assert run["status"] == "FINISHED"
    if stage == "preprocess":
        assert f"{stage}: runtime.trace: no trace: this stage calls no functions of JAX" in output.splitlines()
        assert not traces_of(project, stage)
        return
    (trace,) = traces_of(project, stage)
    perfetto = json.loads(gzip.decompress((trace / "perfetto_trace.json.gz").read_bytes()))
    event_names = {event.get("name") for event in perfetto["traceEvents"]}
    (xplane,) = trace.glob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(xplane)).planes
    read = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert functions_of(run) & event_names & read


def test_stage_that_is_stopped_while_it_is_recorded_has_a_whole_run_and_no_trace(project: Project) -> None:
    before = traces_of(project, "train")
    process = project.start_stage("train")
    stop(process, signal.SIGTERM, when=lambda: any((project.folder / ".outs").glob("train-*-trace.scratch")))
    assert process.returncode == 128 + signal.SIGTERM
    assert traces_of(project, "train") == before
    project.run_stage("train")
    (run,) = project.runs_of("train")
    assert run["status"] == "FINISHED"
    assert len(traces_of(project, "train")) == len(before) + 1
    assert all(path.suffix == ".lock" for path in (project.folder / ".outs").iterdir())
