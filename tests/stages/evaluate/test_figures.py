"""Figures and tables of an evaluation show its confusion matrix, its calibration and its mistakes."""

from pathlib import Path

import numpy as np
import pandas as pd
from factories import random_split

from gradtrail.core.evaluate.metrics import Evaluation, evaluate
from gradtrail.stages.evaluate import tables
from gradtrail.stages.evaluate.members import MembersEvaluation, Predictions


def evaluation(num_examples: int, num_classes: int = 3, *, perfect: bool = False) -> Evaluation:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(num_classes), num_examples).astype(np.float32)
    wrong = (probabilities.argmax(axis=1) + 1) % num_classes
    labels = (probabilities.argmax(axis=1) if perfect else wrong).astype(np.int32)
    return evaluate(np.log(probabilities), labels, temperature=2.0, calibration_bins=3)


def test_tables_have_every_prediction_and_as_many_mistakes_as_asked_for(tmp_path: Path) -> None:
    split, result = random_split(20), evaluation(20)
    predictions = Predictions(
        seed=0, weights=Path("final"), epoch=1, validation=result.probabilities, test=result.probabilities
    )
    alone = MembersEvaluation(predictions=[predictions], members=[result], ensemble=result)
    tables.write_tables(tmp_path / "evaluate", split, alone, 5)
    assert len(pd.read_csv(tmp_path / "evaluate" / "mistakes.csv")) == 5
    everyone = pd.read_parquet(tmp_path / "evaluate" / "predictions.parquet")
    np.testing.assert_array_equal(everyone["example_id"], split.example_id)
    probabilities = everyone[[f"probability_{label}" for label in range(3)]].to_numpy()
    np.testing.assert_array_equal(probabilities, result.probabilities)
