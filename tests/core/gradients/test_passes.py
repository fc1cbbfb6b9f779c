"""The passes on several devices, in a process that has them: the figures of one device, and each with its share."""

import json
from typing import Any

import pytest
from factories import run_on_devices

pytestmark = pytest.mark.slow

ANALYZE = """
import json

import jax
import numpy as np
from factories import NUM_CLASSES, gradients_config, model_config, new_compiler, random_split

from gradtrail.core.sharding import make_mesh
from gradtrail.core.gradients.analysis import Trajectory, analyze
from gradtrail.core.gradients.passes import compile_passes
from gradtrail.core.nn.models import Model

splits = {name: random_split(size) for name, size in (("train", 37), ("test", 9))}
found = {}
for kind in ("mlp", "cnn"):
    model = Model(model_config(kind))
    params = {epoch: model.init(key=jax.random.key(epoch)) for epoch in (0, 1)}
    rates = np.full(4, 0.1, np.float32)
    trajectory = Trajectory(params=params, scored=1, learning_rates=rates, steps_per_epoch=4, batch_size=10)
    analyses, sizes = [], []
    for devices in (jax.devices()[:1], jax.devices()):
        passes = compile_passes(
            model, 0.1, 2, compiler=new_compiler(), mesh=make_mesh(devices)
        )
        sizes.append(passes.score.batch_size)
        config = gradients_config()
        analyses.append(analyze(passes, trajectory, splits, config, NUM_CLASSES))
    one, eight = analyses
    gaps = [
        np.max(np.abs(one.scores[split][name] - eight.scores[split][name])) / (1e-9 + np.max(np.abs(values)))
        for split in splits for name, values in one.scores[split].items()
    ]
    gaps.append(np.max(np.abs(one.influence - eight.influence)) / np.max(np.abs(one.influence)))
    gaps += [abs(one.noise_scales[e].trace / eight.noise_scales[e].trace - 1) for e in params]
    found[kind] = {"gap": float(max(gaps)), "sizes": sizes}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads(run_on_devices(ANALYZE, 8))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_eight_devices_give_the_results_of_one(kind: str, results: dict[str, Any]) -> None:
    assert results[kind]["gap"] < 1e-4
    one, eight = results[kind]["sizes"]
    assert eight == 8 * one
