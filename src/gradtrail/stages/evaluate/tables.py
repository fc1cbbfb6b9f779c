"""Tables of an evaluation: predictions of every example, the worst mistakes, classes and calibration."""

from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.common.split import Split
from gradtrail.core.evaluate.metrics import Evaluation
from gradtrail.stages.evaluate.members import MembersEvaluation


def write_tables(folder: Path, split: Split, evaluation: MembersEvaluation, num_mistakes: int) -> None:
    """Write a split's tables to a new folder; for several members those of the ensemble, and a row for each member.

    `predictions.parquet`: the label, prediction, loss and calibrated class probabilities of every example; of several
    members also the share of them that agree with the prediction.
    `mistakes.csv`: the `num_mistakes` most confident wrong predictions. `classes.csv`: label and prediction of every
    example, for DVC's confusion plot. `calibration.csv` and `calibration_uncalibrated.csv`: the bins of the
    reliability diagram. `per_class.csv`: metrics of each class.
    """
    folder.mkdir(parents=True)
    result = evaluation.ensemble
    predictions = prediction_table(split, result)
    if len(evaluation.members) > 1:
        predictions["agreement"] = evaluation.agreement()
        evaluation.table(split).to_csv(folder / "members.csv", index=False, float_format="%.9g")
    predictions.to_parquet(folder / "predictions.parquet", index=False)
    predictions[["label", "predicted"]].to_csv(folder / "classes.csv", index=False)
    mistakes = predictions.loc[
        result.mistakes[:num_mistakes], ["example_id", "label", "predicted", "probability", "loss"]
    ]
    _write_csv(folder / "mistakes.csv", mistakes)
    _write_csv(folder / "calibration.csv", pd.DataFrame(vars(result.reliability)).dropna())
    _write_csv(folder / "calibration_uncalibrated.csv", pd.DataFrame(vars(result.reliability_uncalibrated)).dropna())
    by_class = pd.DataFrame(vars(result.per_class))
    _write_csv(folder / "per_class.csv", by_class.rename_axis("class").reset_index())


def prediction_table(split: Split, result: Evaluation) -> pd.DataFrame:
    """Return a row for each example, in the order of the split."""
    table = pd.DataFrame(
        {
            "example_id": split.example_id,
            "label": split.labels,
            "predicted": result.predicted.astype(np.int32),
            "probability": result.probability,
            "loss": result.example_loss,
        }
    )
    columns = {f"probability_{label}": column for label, column in enumerate(result.probabilities.T)}
    return table.assign(**columns)


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    table.to_csv(path, index=False, float_format="%.6g")
