"""The training examples that `train.changes` removed or relabeled: `results/train/changes.parquet`, if there are any.

`train` writes it next to the tables. `gradients` and `report` read it, to see the split as it was trained on.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Int

from gradtrail.core import data
from gradtrail.core.data import Split
from gradtrail.stages.data.data_files import read_samples
from gradtrail.stages.data.parquet import read_parquet

_FILE, _COLUMNS = "changes.parquet", ("example_id", "label")


def write_changes(folder: Path, train: Split, labels: Int[np.ndarray, " examples"]) -> None:
    """Write each example whose label in the training differs, `data.REMOVED` if it was removed."""
    rows = np.flatnonzero(labels != train.labels)
    table = pd.DataFrame({"example_id": train.example_id[rows], "label": labels[rows]}, columns=_COLUMNS)
    table.to_parquet(folder / _FILE, index=False)


def as_trained(train: Split, results: Path) -> Split:
    """Return the training split, or rows of it, as the training with these results saw it.

    Raises:
        UserError: the file is damaged; one line.
    """
    if not (results / _FILE).is_file():
        return train
    return data.as_trained(train, *read_parquet(results / _FILE, _COLUMNS).to_numpy().T)


def read_trained(processed: Path, results: Path) -> dict[str, Split]:
    """Read the splits of a processed folder as `read_samples` does, the training split as it was trained on."""
    splits = read_samples(processed)
    return splits | {"train": as_trained(splits["train"], results)}
