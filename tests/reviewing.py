"""The application of `gradtrail review` over random images, for the tests of the page."""

from pathlib import Path

import numpy as np
from factories import NUM_CLASSES, dataset_info, random_split, split_of
from stage_results import suspects_table

from gradtrail.core.data import Split
from gradtrail.stages.artifacts import data_files


def random_splits(num_classes: int = NUM_CLASSES, shape: tuple[int, int] = (4, 3)) -> dict[str, Split]:
    """Splits as `preprocess` cuts them: training and validation examples come from one file."""
    whole = random_split(36, num_classes=num_classes, shape=shape)
    held_out = np.arange(36) % 6 == 0
    parts = {"train": ~held_out, "validation": held_out}
    cut = {
        name: split_of(whole.images[rows], whole.labels[rows], whole.example_id[rows]) for name, rows in parts.items()
    }
    return cut | {"test": random_split(5, num_classes=num_classes, shape=shape)}


def write_project(folder: Path, num_classes: int = NUM_CLASSES) -> dict[str, Split]:
    """Write what `gradtrail review` reads to a project's folder."""
    splits = random_splits(num_classes)
    for part in (".dvc", "src/gradtrail", "data", "results/audit", "pipeline"):
        (folder / part).mkdir(parents=True)
    (folder / "dvc.yaml").touch()
    data_files.write_processed(folder / "data/processed", splits, dataset_info())
    table = suspects_table(splits, num_classes=num_classes)
    table.to_parquet(folder / "results/audit/suspects.parquet", index=False)
    return splits
