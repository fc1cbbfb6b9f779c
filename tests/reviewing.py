"""A review of random images, for the tests of its parts."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from factories import NUM_CLASSES, dataset_info, random_split, split_of
from stage_results import suspects_table

from gradtrail.core.data import Split
from gradtrail.experiments.review import suspects
from gradtrail.experiments.review.session import Decisions, Review
from gradtrail.stages.artifacts import data_files

NUM_EXAMPLES = {"train": 30, "validation": 6, "test": 5}


def random_splits(num_classes: int = NUM_CLASSES, shape: tuple[int, int] = (4, 3)) -> dict[str, Split]:
    """Splits as `preprocess` cuts them: training and validation examples come from one file."""
    whole = random_split(36, num_classes=num_classes, shape=shape)
    held_out = np.arange(36) % 6 == 0
    parts = {"train": ~held_out, "validation": held_out}
    cut = {
        name: split_of(whole.images[rows], whole.labels[rows], whole.example_id[rows]) for name, rows in parts.items()
    }
    return cut | {"test": random_split(5, num_classes=num_classes, shape=shape)}


def new_review(folder: Path, *, num_classes: int = NUM_CLASSES, limit: int = 8, **changed: Any) -> Review:
    """A review whose clock counts seconds."""
    splits = random_splits(num_classes)
    table = suspects.read_suspects(write_table(folder, splits, num_classes))
    seconds = itertools.count()
    values: dict[str, Any] = {
        "suspects": suspects.choose_suspects(table, splits, limit=limit, num_neighbours=4),
        "train": splits["train"],
        "decisions": Decisions(folder / "corrections.csv", folder / "lock"),
        "probabilities": {(row.split == "test", row.example_id): row.probability_wrong for row in table.itertuples()},
        "class_names": [str(label) for label in range(num_classes)],
        "title": "digits",
        "reviewer": "Ann",
        "now": lambda: f"2026-01-01T00:00:{next(seconds):02}Z",
    }
    return Review(**values | changed)


def write_table(folder: Path, splits: dict[str, Split], num_classes: int = NUM_CLASSES) -> Path:
    """Write the audit's table."""
    path = folder / "suspects.parquet"
    suspects_table(splits, num_classes=num_classes).to_parquet(path, index=False)
    return path


def write_project(folder: Path) -> dict[str, Split]:
    """Write what `gradtrail review` reads to a project's folder."""
    splits = random_splits()
    (folder / "data").mkdir(parents=True)
    (folder / "results" / "audit").mkdir(parents=True)
    data_files.write_processed(folder / "data" / "processed", splits, dataset_info())
    write_table(folder / "results" / "audit", splits)
    return splits
