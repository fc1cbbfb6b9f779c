"""What stages compute from the same weights agrees between kinds of processors, as far as one machine can show it."""

import json
from pathlib import Path

import numpy as np
import pytest
from projects import Project, finished_project

STAGES = ("evaluate", "gradients")


def metrics_with(project: Project, flags: list[str]) -> dict[str, float]:
    """Return what the stages measure with flags for XLA, without costs of compiled functions."""
    project.set("environment.xla_flags", flags)
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
    widest, narrower = metrics_with(project, []), metrics_with(project, ["--xla_cpu_max_isa=AVX2"])
    assert len(widest) > 30
    differing = {
        key: (value, narrower[key]) for key, value in widest.items() if not np.isclose(value, narrower[key], rtol=1e-6)
    }
    assert not differing
