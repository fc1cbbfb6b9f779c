"""Tables of an audit: every label once, the most suspicious first; documented files with equal bytes."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import NUM_CLASSES, random_split

from gradtrail.core.audit.labels import Findings, OutOfFold, find_errors
from gradtrail.core.audit.networks import NOISE_KINDS
from gradtrail.stages import audit
from gradtrail.stages.common.files import digest

SPLITS = {"train": random_split(300), "validation": random_split(40), "test": random_split(60)}
CORRECT = SPLITS["train"].labels


def out_of_fold(truth: np.ndarray, labels: np.ndarray) -> OutOfFold:
    """Logits of three networks that are right and sure of it, but for an eighth of the examples."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, len(truth), NUM_CLASSES)).astype(np.float32)
    logits[:, np.arange(len(truth)), truth] += np.where(np.arange(len(truth)) % 8, 8, 1)
    return OutOfFold(labels=labels, logits=logits, grad_norm=rng.random(len(truth)).astype(np.float32))


def planted() -> OutOfFold:
    labels = CORRECT.copy()
    labels[:30] = (labels[:30] + 1) % NUM_CLASSES
    return out_of_fold(CORRECT, labels)


@pytest.fixture(scope="module")
def findings() -> dict[str, Findings]:
    return find_errors(
        {name: out_of_fold(split.labels, split.labels) for name, split in SPLITS.items()}, "odds", seed=0
    )


def test_every_label_has_a_row_and_the_contract_its_columns(findings: dict[str, Findings]) -> None:
    table = audit.suspect_table(SPLITS, findings, "odds")
    columns = ["split", "example_id", "label", "score", "proposed_label", "proposed_probability", "probability_wrong"]
    assert list(table.columns[:7]) == columns
    assert table["probability_wrong"].between(0, 1).all()
    for name, split in SPLITS.items():
        part = table[table["split"] == name]
        assert part["score"].is_monotonic_decreasing
        by_id = part.sort_values("example_id")
        assert np.array_equal(by_id["example_id"], split.example_id)
        assert np.array_equal(by_id["label"], split.labels)
        assert np.array_equal(by_id["proposed_label"], findings[name].proposed)


def test_planted_labels_come_first_and_are_probably_wrong() -> None:
    is_wrong = planted().labels != CORRECT
    result = find_errors({"train": planted()}, "odds", seed=0, label_set=1)["train"]
    clear = is_wrong & (np.arange(300) % 8 > 0)
    assert result.scores["odds"][clear].min() > np.quantile(result.scores["odds"][~is_wrong], 0.99)
    assert result.probability_wrong[clear].min() > 0.5
    assert result.rate.low < 0.1 < result.rate.high


def test_chosen_score_is_the_candidate_with_the_largest_mean_auroc() -> None:
    rows = [(kind, name, 0.9, 0.9) for kind in NOISE_KINDS for name in ("margin", "odds", "el2n", "self_confidence")]
    rows += [(kind, name, 0.8, 0.99) for kind in NOISE_KINDS for name in ("log_margin", "disagreement")]
    rows += [(kind, "grad_norm", 1.0, 1.0) for kind in NOISE_KINDS]
    detection = pd.DataFrame(rows, columns=["noise", "score", "auroc", "average_precision"])
    detection.loc[detection["score"].eq("el2n") & detection["noise"].eq("confused"), "auroc"] = 0.95
    assert audit.choose_score(detection) == "el2n", "the norm of the gradient is no candidate"


def test_documented_files_are_written_with_equal_bytes(findings: dict[str, Findings], tmp_path: Path) -> None:
    copies = dict.fromkeys(NOISE_KINDS, planted())
    detection = audit.detection_table(copies, CORRECT)
    calibration = audit.calibrate(copies, CORRECT, "odds", seed=0)
    suspects = audit.suspect_table(SPLITS, findings, "odds")
    for name in ("one", "two"):
        audit.write_tables(tmp_path / name, suspects, detection, calibration)
        audit.write_figures(tmp_path / name, suspects, SPLITS, calibration, "title", 5, "0123456789")
    galleries = {f"suspects_{name}.png" for name in SPLITS}
    expected = {"suspects.parquet", "detection.csv", "calibration.csv", "calibration.png", *galleries}
    assert {path.name for path in (tmp_path / "one").iterdir()} == expected
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    metrics = audit.audit_metrics(findings, SPLITS, detection, calibration, "odds")
    assert metrics["train/expected_errors_low"] <= metrics["train/expected_errors"]
    assert metrics["uniform/auroc"] == metrics["uniform/odds/auroc"] > 0.95
