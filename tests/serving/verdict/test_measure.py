"""Measuring in fresh processes, and why their interval is over processes."""

import math
from pathlib import Path

import numpy as np
import pytest
from exports import write_wrong_export

from gradtrail.core.common.intervals import median_interval
from gradtrail.serving.verdict import probe
from gradtrail.serving.verdict.judge import KINDS
from gradtrail.serving.verdict.measure import COLD, WARM, measure, measured
from gradtrail.stages.artifacts.exported import ExportedModel
from gradtrail.support.errors import UserError

RECORDED = {"accuracy_lower_bound", "calibration_error", "worst_class_recall", "agreement", "size_mib"}  # from files


@pytest.mark.slow
def test_every_limit_without_a_record_is_measured(exported, tmp_path: Path):
    numbers = measure(exported(0), processes=2)
    assert KINDS.keys() - RECORDED <= numbers.keys()
    for name, number in numbers.items():
        assert len(number.values) == 2, name
        assert number.value > 0, name
        assert math.isinf(number.high), name  # of two processes there is no upper end
    assert numbers["p50_ms_1"].value <= numbers["p99_ms_1"].value
    assert numbers["p50_ms_1"].value < 1000 * numbers[WARM].value
    assert min(numbers[WARM].values) > 0.1  # imports alone take longer
    assert set(numbers) >= {COLD, WARM}


def test_model_that_cannot_answer_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=rf"the model cannot answer: {tmp_path}/manifest\.json: no such file"):
        measure(tmp_path, processes=1)
    wrong = write_wrong_export(tmp_path / "wrong", answers="-1 to 2")
    with pytest.raises(UserError, match="the model cannot answer: digits: its answers to 1 of 1 images are not prob"):
        measure(wrong, processes=1)


def test_every_batch_size_is_run(exported, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    predict = ExportedModel.predict

    def recorded(self: ExportedModel, images: np.ndarray) -> np.ndarray:
        sizes.append(len(images))
        return predict(self, images)

    monkeypatch.setattr(ExportedModel, "predict", recorded)
    monkeypatch.setattr(probe, "_timed", lambda *_, **__: [0.001])
    probe.steady(exported(0))
    assert sizes == [1, 1, 32]


def test_six_processes_have_the_range_as_the_interval_of_their_median():
    number = measured([5, 1, 4, 2, 6, 3])
    assert (number.low, number.value, number.high) == (1, 3.5, 6)


def test_interval_over_processes_covers_the_median_and_that_over_answers_does_not():
    """Each process is slow or fast as a whole: the answers of one process do not tell of the next one's."""
    rng = np.random.default_rng(0)
    held, held_by_answers = [], []
    for _ in range(400):
        speeds = np.exp(rng.normal(0, 0.2, 6))
        answers = speeds[:, None] * rng.lognormal(0, 0.1, (6, 40))
        interval = measured([float(np.median(process)) for process in answers])
        held.append(interval.low <= 1 <= interval.high)
        median = median_interval(answers.ravel().tolist())
        held_by_answers.append(median.low <= 1 <= median.high)
    assert np.mean(held) >= 0.93
    assert np.mean(held_by_answers) < 0.5
