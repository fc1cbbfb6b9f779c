"""A folder of one's own images, of another size and number of classes, goes through the whole pipeline."""

import json
from pathlib import Path

import numpy as np
import pytest
from projects import Project, copy_project

from gradtrail.stages.data.data_files import RAW_FILES, encode_idx

pytestmark = pytest.mark.slow
SHAPE, NUM_CLASSES = (12, 10), 6  # the last but one with a single training example, the last with none
QUICK = {
    "fetch.dataset": "idx",
    "train.epochs": 1,
    "train.batch_size": 16,
    "train.keep_epochs": [0, 1],
    "train.model": "cnn",
    "train.cnn.channels": [4],
    "train.cnn.hidden": [8],
    "gradients.bootstrap_samples": 100,
    "profile.steps": 2,
    "profile.smallest_batch_size": 16,
    "profile.largest_batch_size": 16,
    "profile.seconds": 0.05,
    "profile.precisions": ["float32"],
    "runtime.tracking": False,
}


def write_own(folder: Path, seed: int) -> Path:
    """Write images whose brightness tells their class, but for noise."""
    generator = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    for count, names in ((200, RAW_FILES[:2]), (80, RAW_FILES[2:])):
        labels = np.arange(count, dtype=np.uint8) % (4 if count == 200 else NUM_CLASSES)
        labels[0] = 4
        images = (labels * 40)[:, None, None] + generator.integers(0, 50, (count, *SHAPE), dtype=np.uint8)
        for name, array in zip(names, (images, labels), strict=True):
            (folder / name).write_bytes(encode_idx(array))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """The project after `dvc repro`, and what that printed."""
    project = copy_project(tmp_path_factory.mktemp("own") / "project")
    project.change(QUICK)
    return project, project.dvc("repro", env={"IDX_DIR": str(write_own(project.folder.with_name("folder"), 0))})


@pytest.fixture(scope="module")
def project(made: tuple[Project, str]) -> Project:
    return made[0]


def test_every_stage_took_the_size_and_the_classes_from_the_data(project: Project) -> None:
    info = json.loads((project.folder / "data/processed/dataset.json").read_text())
    assert (info["name"], tuple(info["image_shape"]), info["num_classes"]) == ("idx", SHAPE, NUM_CLASSES)
    for stage in ("fetch", "preprocess", "train", "evaluate", "gradients", "profile", "report"):
        assert project.metrics_of(stage)["dataset_digest"] == info["digest"][:12]
    assert project.metrics_of("evaluate")["num_examples"] == 80
    assert project.metrics_of("gradients")["num_examples"] == 280


def test_small_classes_are_one_line_and_no_warning_of_numpy(made: tuple[Project, str]) -> None:
    project, output = made
    assert output.count("preprocess: classes with fewer than two training examples: 4 (1), 5 (0); ") == 1
    assert "RuntimeWarning" not in output
    assert "coherence_within_classes" in project.metrics_of("gradients")


@pytest.mark.parametrize("path", ["results/report.html", "results/gradients/summary.md", "results/metrics/report.json"])
def test_no_text_speaks_of_another_data_set(project: Project, path: str) -> None:
    text = (project.folder / path).read_text().lower()
    assert not {"mnist", "digit", "clothing"} & {word.strip(".,:;()") for word in text.split()}
    assert "not mnist" not in text


def test_forced_fetch_reads_a_changed_folder(project: Project) -> None:
    env = {"IDX_DIR": str(write_own(project.folder.with_name("folder"), 1))}
    before = project.metrics_of("fetch")["dataset_digest"]
    assert project.ran(project.dvc("repro", "fetch", env=env)) == []
    assert project.ran(project.dvc("repro", "--force", "--single-item", "fetch", env=env)) == ["fetch"]
    assert project.metrics_of("fetch")["dataset_digest"] != before
    assert project.ran(project.dvc("repro", "preprocess", env=env)) == ["preprocess"]
