"""The members of a training: networks that differ only in the seed, and statistics over them.

`models/members/members.json` lists their seeds. If there are several, `models/members/seed_K` and
`results/train/members/seed_K` hold the outputs that a training with seed K alone would write, and `models` holds the
weights of the first.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtrail.core.intervals import TAILS, Interval
from gradtrail.stages.common.files import read_json, write_json

if TYPE_CHECKING:  # it imports JAX, and tracking reads the list of members
    from gradtrail.core.nn.models import WeightsKind

FOLDER = "members"
_INDEX = "members.json"
_SUFFIXES = ("_sd", "_low", "_high")
_RANGES = {  # pattern of a metric's name → lowest and highest value that it can have; the first that matches
    "correlation": (-1.0, 1.0),
    "accuracy|precision|recall|f1|calibration_error|auroc|_rate|misclassified|never_correct|held_by": (0.0, 1.0),
    "loss|cross_entropy|brier|temperature|_norm|^num_|events": (0.0, math.inf),
    "": (-math.inf, math.inf),
}


def member_folder(folder: Path, seed: int) -> Path:
    """Return the folder of one of several members, in `models` or `results/train`."""
    return folder / FOLDER / f"seed_{seed}"


def write_seeds(models: Path, seeds: Sequence[int]) -> None:
    """Write the list of the members."""
    write_json(models / FOLDER / _INDEX, {"seeds": [*seeds]})


def read_seeds(models: Path) -> list[int]:
    """Read the seeds of the members, at least one, ascending."""
    seeds: list[int] = read_json(models / FOLDER / _INDEX)["seeds"]
    return seeds


def read_folders(folder: Path, models: Path) -> dict[int, Path]:
    """Return seed → folder of a member's files, under `models` or `results/train`; a single member's is `folder`."""
    seeds = read_seeds(models)
    return {seed: member_folder(folder, seed) if len(seeds) > 1 else folder for seed in seeds}


def weights_paths(models: Path, kind: "WeightsKind") -> dict[int, Path]:
    """Return seed → weights file of each member."""
    return {seed: folder / f"{kind}.safetensors" for seed, folder in read_folders(models, models).items()}


def format_seeds(seeds: Sequence[int]) -> str:
    """Return `seed 3`, or `seeds 3 to 7`."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def spread(name: str, values: Sequence[float]) -> Interval:
    """Return the mean of a metric of this name over at least two members, with its 95 % interval.

    The interval is Student's t over seeds: the range in which the mean over many more seeds would be, on the same data.
    It is clipped to the range of the metric, such as 0 to 1 for an accuracy.
    """
    lowest, highest = next(ends for pattern, ends in _RANGES.items() if re.search(pattern, name))
    from scipy.special import stdtrit  # here: only several members need it

    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(stdtrit(len(values) - 1, TAILS[1])) * deviation / math.sqrt(len(values))
    return Interval(value=mean, low=max(mean - half, lowest), high=min(mean + half, highest))


def over_members(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of a training from those of its members; for a single member, its own.

    For several members, text and equal whole numbers are kept as they are; every other number becomes its mean, with
    its standard deviation and the ends of its interval under the suffixes `_sd`, `_low` and `_high`. Intervals of
    single members are left out, and so are metrics that a member lacks.
    """
    if len(metrics) == 1:
        return dict(metrics[0])
    combined: dict[str, Any] = {"members": len(metrics)}
    for key in metrics[0]:
        is_end = any(key.endswith(suffix) and key.removesuffix(suffix) in metrics[0] for suffix in _SUFFIXES)
        if is_end or not all(key in row for row in metrics):
            continue
        values = [row[key] for row in metrics]
        if not isinstance(values[0], float) and all(value == values[0] for value in values):
            combined[key] = values[0]
            continue
        mean, deviation = spread(key, values), float(np.std(values, ddof=1))
        combined |= {key: mean.value, f"{key}_sd": deviation, f"{key}_low": mean.low, f"{key}_high": mean.high}
    return combined
