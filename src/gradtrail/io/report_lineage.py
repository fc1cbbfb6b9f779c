"""Which files and folders of data each stage reads and writes, and their digests: the lineage that the report shows.

Told here once more than in `dvc.yaml`, because the page may follow only from what its stage depends on; a test
compares the two.
"""

from pathlib import Path

from gradtrail.io.digests import digest
from gradtrail.io.errors import UserError

READS: dict[str, tuple[str, ...]] = {
    "fetch": (),
    "preprocess": ("data/raw",),
    "train": ("data/processed/dataset.json", "data/processed/train.npz", "data/processed/validation.npz"),
    "evaluate": (
        "data/processed/dataset.json",
        "data/processed/test.npz",
        "models/best.safetensors",
        "models/final.safetensors",
    ),
    "gradients": (
        "data/processed",
        "models/best.safetensors",
        "models/epochs",
        "models/final.safetensors",
        "results/train/dynamics.parquet",
        "results/train/epochs.csv",
        "results/train/steps.parquet",
    ),
    "profile": ("data/processed/dataset.json",),
}
WRITES: dict[str, tuple[str, ...]] = {
    "fetch": ("data/raw", "metrics/fetch.json"),
    "preprocess": ("data/processed", "results/preprocess", "metrics/preprocess.json"),
    "train": (
        "models/best.safetensors",
        "models/epochs",
        "models/final.safetensors",
        "results/train",
        "metrics/train.json",
    ),
    "evaluate": ("results/evaluate", "metrics/evaluate.json"),
    "gradients": ("results/gradients", "metrics/gradients.json"),
    "profile": ("results/profile", "metrics/profile.json"),
}


def digests_of(folder: Path) -> dict[str, str]:
    """Return path → digest of everything that a stage reads or writes; raise UserError where one is missing."""
    paths = sorted({path for each in (READS, WRITES) for some in each.values() for path in some})
    for path in paths:
        if not (folder / path).exists():
            raise UserError(f"{folder / path}: no such file; `dvc repro` makes it")
    return {path: digest(folder / path) for path in paths}
