"""The gradient analyses of a training's members: the scores of each on disk, and the means over all.

Memory holds the tables of two members, however many there are. Results of an analysis as a whole, such as the
similarity of the classes' gradients and the influences, are those of the first member.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.gradients.analysis import GradientAnalysis
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.stages.artifacts.members import FOLDER, over_members
from gradtrail.stages.gradients.tables import SUSPICION, Tables, make_tables, measure

ERROR = "_se"  # suffix of a score: the standard error of its mean over the members
WITH_ERROR = (
    *("grad_norm", "el2n", "loss", "margin", "probability", "self_influence", "alignment", "class_alignment"),
    *("mean_probability", SUSPICION),
)
_IDENTITY = ["split", "example_id", "label", "true_label"]
_PREDICTED, _CORRECT = "predicted", "correct"


class MeanScores:
    """Mean of each score over members, with standard errors, by Welford's updates in float64.

    Source: B. P. Welford, Technometrics 4(3), 1962.
    """

    def __init__(self) -> None:
        self._identity = pd.DataFrame()
        self._counts: dict[str, int] = {}
        self._means: dict[str, np.ndarray] = {}
        self._squares: dict[str, np.ndarray] = {}
        self._votes = np.zeros((0, 0), np.int32)

    def add(self, scores: pd.DataFrame) -> None:
        """Add the table of one more member; see `tables.score_table`."""
        if not self._counts:
            self._identity = scores[_IDENTITY]
            self._votes = np.zeros((len(scores), 0), np.int32)
        for name in scores.columns.drop([*_IDENTITY, _PREDICTED, _CORRECT]):
            values, mean = scores[name].to_numpy(np.float64), self._means.get(name, np.float64(0))
            self._counts[name] = self._counts.get(name, 0) + 1
            self._means[name] = mean + (values - mean) / self._counts[name]
            if name in WITH_ERROR:
                change = (values - mean) * (values - self._means[name])
                self._squares[name] = self._squares.get(name, np.float64(0)) + change
        predicted = scores[_PREDICTED].to_numpy()
        missing = max(0, int(predicted.max()) + 1 - self._votes.shape[1])
        self._votes = np.pad(self._votes, ((0, 0), (0, missing)))
        self._votes[np.arange(len(predicted)), predicted] += 1

    def table(self) -> pd.DataFrame:
        """Return a row for each example: means over the members that have a score, at least two.

        `predicted` is the class that most members predict, the first of several such classes; `correct` follows from
        it.
        """
        columns: dict[str, np.ndarray] = {}
        for name, mean in self._means.items():
            columns[name] = mean.astype(np.float32)
            if name in WITH_ERROR:
                count = self._counts[name]
                columns[f"{name}{ERROR}"] = np.sqrt(self._squares[name] / (count - 1) / count).astype(np.float32)
        predicted = self._votes.argmax(axis=1).astype(np.int32)
        columns |= {_PREDICTED: predicted, _CORRECT: predicted == self._identity["label"].to_numpy()}
        return pd.concat([self._identity, pd.DataFrame(columns)], axis=1)


class Members:
    """The analyses of members, added one after the other.

    Args:
        scratch: an empty folder for the scores of each member.

    Attributes:
        seeds: seeds of the members.
        errors: the largest error of each kind over the members, see `float64_errors`.
    """

    first: GradientAnalysis  # analysis of the first member
    _tables: Tables  # of the first

    def __init__(self, scratch: Path):
        self.seeds: list[int] = []
        self.errors: dict[str, float] = {}
        self._scratch = scratch
        self._mean = MeanScores()
        self._metrics: list[dict[str, float]] = []

    def add(self, seed: int, tables: Tables, analysis: GradientAnalysis, errors: Mapping[str, float]) -> None:
        """Add the analysis of the member with this seed, and write its scores to disk."""
        if not self.seeds:
            self.first, self._tables = analysis, tables
        self.seeds.append(seed)
        self.errors = {name: max(value, self.errors.get(name, 0.0)) for name, value in errors.items()}
        self._metrics.append(measure(tables, analysis))
        self._mean.add(tables.scores)
        tables.scores.to_parquet(self._scratch / f"seed_{seed}.parquet", index=False)

    def tables(self, config: GradientsConfig) -> Tables:
        """Return the tables of a single member, or of the mean scores over several."""
        return self._tables if len(self.seeds) == 1 else make_tables(self._mean.table(), self.first, config)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a single member, or means and spreads over several."""
        return over_members(self._metrics)

    def write(self, results: Path) -> None:
        """Write the scores of each of several members to the results of the stage."""
        if len(self.seeds) > 1:
            shutil.copytree(self._scratch, results / FOLDER)
