"""An export has the same bytes wherever it is made, and answers to the bit as the jitted forward pass does."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from exports import SHAPE, random_params, small_network
from factories import dataset_info, model_config
from projects import ROOT

from gradtrail.core.common.intervals import Interval
from gradtrail.core.export.forward import ExportConfig, forward, tensors
from gradtrail.core.nn.models import CNNConfig, MLPConfig, Model
from gradtrail.stages.artifacts.calibration import Evaluated
from gradtrail.stages.artifacts.exported import read_export
from gradtrail.stages.artifacts.weights import WeightsInfo, write_weights
from gradtrail.stages.common.digests import digest
from gradtrail.stages.export.package import read_network, write_export
from gradtrail.support.errors import UserError

SIZES = (1, 8, 32, 128)
IMAGES = np.random.default_rng(0).integers(0, 256, (128, *SHAPE), np.uint8)
DEFAULT = {  # the networks of params.yaml
    "mlp": {"mlp": MLPConfig(hidden=(256, 128), activation="relu", dropout=0.0)},
    "cnn": {
        "kind": "cnn",
        "cnn": CNNConfig(
            channels=(32, 64),
            convolutions=1,
            kernel_size=3,
            norm="none",
            groups=8,
            hidden=(128,),
            activation="relu",
            dropout=0.0,
        ),
    },
}


@pytest.mark.parametrize(
    ("kind", "num_members"),
    [
        ("small", 1),
        *(pytest.param(kind, members, marks=pytest.mark.slow) for kind in DEFAULT for members in (1, 2)),
    ],
)
def test_each_served_batch_size_is_equal_to_the_jitted_forward_pass(
    kind: str, num_members: int, tmp_path: Path
) -> None:
    network = small_network(members=num_members)
    if kind != "small":
        model = Model(model_config(image_shape=SHAPE, num_classes=10, **DEFAULT[kind]))
        members = {seed: random_params(model, seed) for seed in network.members}
        network = dataclasses.replace(network, model=model, members=members)
    write_export(tmp_path / "export", network, ExportConfig(name="digits", batch_sizes=SIZES))
    exported = read_export(tmp_path / "export")
    jitted = jax.jit(forward(network.model, num_members))
    leaves = tensors([*network.members.values()], network.temperature)
    for size in SIZES:
        exported.compile(size)
        expected = np.asarray(jitted(leaves, IMAGES[:size]))
        np.testing.assert_array_equal(np.asarray(exported.run(IMAGES[:size])), expected)


@pytest.mark.slow
def test_two_checkouts_in_different_folders_write_the_same_bytes(tmp_path: Path) -> None:
    """Each with the code and the working folder of its own."""
    digests = set()
    for name in ("one", "a/longer/path/to/another"):
        place = tmp_path / name
        shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        code = (
            "from pathlib import Path\n"
            "import exports\n"
            "exports.write_small_export(Path('models/export').resolve(), model='cnn', members=2)"
        )
        env = os.environ | {"PYTHONPATH": f"{place}/src:{place}/tests"}
        subprocess.run([sys.executable, "-c", code], cwd=place, env=env, check=True)
        digests.add(digest(place / "models/export"))
        written = b"".join(path.read_bytes() for path in (place / "models/export").iterdir())
        assert str(tmp_path).encode() not in written
        assert b".py" not in written
    assert len(digests) == 1


def evaluated(*paths: Path) -> Evaluated:
    error = Interval(value=0.1, low=0.0, high=0.2)
    return Evaluated(kind="best", weights=dict(enumerate(paths, 3)), temperature=0.5, calibration_error=error)


def test_evaluated_networks_are_exported(tmp_path: Path) -> None:
    model, paths = Model(model_config()), [tmp_path / f"{seed}.safetensors" for seed in (3, 4)]
    for seed, path in enumerate(paths, 3):
        info = WeightsInfo(model=model.config, label_smoothing=0.1, dataset=dataset_info(), epoch=seed)
        write_weights(path, random_params(model, seed), info)
    network = read_network(evaluated(*paths), dataset_info())
    assert (network.weights, network.epochs, network.temperature) == ("best", (3, 4), 0.5)
    assert network.classes == ("0", "1", "2")
    jax.tree.map(np.testing.assert_array_equal, network.members, {seed: random_params(model, seed) for seed in (3, 4)})
    with pytest.raises(UserError, match="trained on other data"):
        read_network(evaluated(*paths), dataclasses.replace(dataset_info(), digest="1" * 64))
    other = Model(model_config(mlp=MLPConfig(hidden=(6,), activation="relu", dropout=0.0)))
    info = WeightsInfo(model=other.config, label_smoothing=0.1, dataset=dataset_info(), epoch=1)
    write_weights(paths[1], random_params(other, 0), info)
    with pytest.raises(UserError, match="the first member is mlp-5"):
        read_network(evaluated(*paths), dataset_info())
