"""A dozen random images in place of MNIST, their sources, and a call of the stage `fetch`."""

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from factories import ROOT
from mirrors import MirrorServer, whole

from gradtrail.stages.artifacts.idx import RAW_FILES, encode_idx
from gradtrail.stages.common.dataset import DatasetInfo
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.datasets.catalog import Contents, FourArrays
from gradtrail.stages.fetch.sources import FetchConfig, acquire
from gradtrail.support.errors import UserError

RUNTIME = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")


def random_arrays(shape: tuple[int, int] = (28, 28), num_classes: int = 10) -> FourArrays:
    generator = np.random.default_rng(0)
    images, test_images = (generator.integers(0, 256, (count, *shape), dtype=np.uint8) for count in (20, 10))
    labels, test_labels = (np.arange(count, dtype=np.uint8) % num_classes for count in (20, 10))
    return images, labels, test_images, test_labels


def as_files(arrays: FourArrays) -> dict[str, bytes]:
    return {name: encode_idx(array) for name, array in zip(RAW_FILES, arrays, strict=True)}


SMALL = as_files(random_arrays())
CONTENTS = Contents(
    image_shape=(28, 28),
    num_train=20,
    num_test=10,
    num_classes=10,
    sha256=tuple(hashlib.sha256(data).hexdigest() for data in SMALL.values()),  # type: ignore[arg-type]
)
LAST = RAW_FILES[3]


def serve_openml(server: MirrorServer, arrays: FourArrays) -> None:
    """Serve what OpenML's API answers for mnist_784: pixels are numeric columns, labels a nominal one."""
    images, labels = np.concatenate(arrays[::2]), np.concatenate(arrays[1::2])
    pixels = [f"pixel{place + 1}" for place in range(784)]
    lines = ["@RELATION mnist_784", *(f"@ATTRIBUTE {pixel} real" for pixel in pixels)]
    lines += ["@ATTRIBUTE class {0,1,2,3,4,5,6,7,8,9}", "@DATA"]
    rows = zip(images.reshape(-1, 784).tolist(), labels.tolist(), strict=True)
    arff = "\n".join([*lines, *(",".join(map(str, [*row, label])) for row, label in rows), ""]).encode()
    flags = {"is_ignore": "false", "is_row_identifier": "false", "number_of_missing_values": "0"}
    features = [{"name": pixel, "data_type": "numeric", "is_target": "false", **flags} for pixel in pixels]
    features.append({"name": "class", "data_type": "nominal", "is_target": "true", **flags})
    description = {"name": "mnist_784", "version": "1", "status": "active", "format": "ARFF", "description": ""}
    description |= {"url": f"{server.base()}/download", "md5_checksum": hashlib.md5(arff).hexdigest()}  # noqa: S324
    answers = {
        "/_SEARCH_NAME/mnist_784/data_version/1": {"data": {"dataset": [{"did": 554, "version": 1}]}},
        "/_DATA_INFO/554": {"data_set_description": description},
        "/_DATA_FEATURES/554": {"data_features": {"feature": features}},
        "/_DATA_QUALITIES/554": {"data_qualities": {"quality": [{"name": "NumberOfInstances", "value": "30"}]}},
    }
    server.routes |= {path: whole(json.dumps(content).encode()) for path, content in answers.items()}
    server.routes |= {"/download": whole(arff), "": whole(b"OpenML")}


def write_folder(folder: Path, files: dict[str, bytes] = SMALL, *, gzipped: bool = False) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / (name + ".gz" * gzipped)).write_bytes(gzip.compress(data) if gzipped else data)
    return folder


class Acquisition:
    """Calls `acquire`, by default with no mirror and without OpenML; stderr is what was reported."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.to, self._capsys = folder / "to", capsys
        self.to.mkdir()

    def acquire(
        self, dataset: str = "mnist", *, mirrors: tuple[str, ...] | None = (), openml: bool = False
    ) -> DatasetInfo:
        runtime = dataclasses.replace(RUNTIME, mirrors=mirrors, openml=openml)
        return acquire(FetchConfig(dataset=dataset), self.to, runtime)

    def refusal(self, dataset: str = "mnist", **sources: object) -> str:
        with pytest.raises(UserError) as error:
            self.acquire(dataset, **sources)  # type: ignore[arg-type]
        return str(error.value)

    def reports(self) -> list[str]:
        lines = self._capsys.readouterr().err.splitlines()
        assert all(line.startswith("fetch: ") for line in lines)
        return [line.removeprefix("fetch: ") for line in lines]

    def written(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.to.iterdir()}
