"""Tables of an audit: every label once, the most suspicious first; scores against scikit-learn's definitions."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import NUM_CLASSES, random_split

from gradtrail.core.audit.ensemble import OutOfFoldLogits
from gradtrail.core.audit.findings import Findings, find, find_planted
from gradtrail.core.audit.planting import KINDS, NoiseKind, Planted
from gradtrail.stages.audit import figures, tables
from gradtrail.stages.common.digests import digest

SPLITS = {"train": random_split(300), "validation": random_split(40), "test": random_split(60)}


def out_of_fold(truth: np.ndarray) -> OutOfFoldLogits:
    """Three networks that are right and sure of it, but for an eighth of the examples."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, len(truth), NUM_CLASSES)).astype(np.float32)
    logits[:, np.arange(len(truth)), truth] += np.where(np.arange(len(truth)) % 8, 8, 1)
    return OutOfFoldLogits(logits=logits, grad_norm=rng.random(len(truth)).astype(np.float32))


def planted() -> dict[NoiseKind, Planted]:
    train = SPLITS["train"]
    labels = train.labels.copy()
    labels[:30] = (labels[:30] + 1) % NUM_CLASSES
    one = Planted(label_set=1, labels=labels, is_wrong=labels != train.labels, out_of_fold=out_of_fold(train.labels))
    return dict.fromkeys(KINDS, one)


@pytest.fixture(scope="module")
def findings() -> dict[str, Findings]:
    judged = {name: out_of_fold(split.labels) for name, split in SPLITS.items()}
    return find(judged, {name: split.labels for name, split in SPLITS.items()}, "odds", seed=0)


def test_every_label_has_a_row_and_the_contract_its_columns(findings: dict[str, Findings]) -> None:
    table = tables.suspect_table(SPLITS, findings, "odds")
    assert list(table.columns[:7]) == tables.SUSPECT
    for name, split in SPLITS.items():
        part = table[table["split"] == name]
        assert sorted(part["example_id"]) == list(split.example_id)
        assert part["score"].is_monotonic_decreasing
        assert np.array_equal(part.sort_values("example_id")["label"], split.labels)
        assert part["probability_wrong"].between(0, 1).all()
        by_id = part.sort_values("example_id")
        assert np.array_equal(by_id["proposed_label"], findings[name].proposed)


def test_planted_labels_come_first_and_are_probably_wrong() -> None:
    one = planted()["uniform"]
    result = find_planted({"uniform": one}, "odds", seed=0)["uniform"]
    clear = one.is_wrong & (np.arange(300) % 8 > 0)
    assert result.scores["odds"][clear].min() > np.quantile(result.scores["odds"][~one.is_wrong], 0.99)
    assert result.probability_wrong[clear].min() > 0.5
    assert result.rate.low < 0.1 < result.rate.high


def test_chosen_score_is_the_candidate_with_the_largest_mean_auroc() -> None:
    rows = [(kind, name, 0.9, 0.9) for kind in KINDS for name in ("margin", "odds", "el2n", "self_confidence")]
    rows += [(kind, name, 0.8, 0.99) for kind in KINDS for name in ("log_margin", "disagreement")]
    rows += [(kind, "grad_norm", 1.0, 1.0) for kind in KINDS]
    detection = pd.DataFrame(rows, columns=["noise", "score", "auroc", "average_precision"])
    detection.loc[detection["score"].eq("el2n") & detection["noise"].eq("confused"), "auroc"] = 0.95
    assert tables.choose_score(detection) == "el2n", "the norm of the gradient is no candidate"


def test_documented_files_are_written_with_equal_bytes(findings: dict[str, Findings], tmp_path: Path) -> None:
    detection = tables.detection_table(planted())
    calibration = tables.calibration_of(planted(), find_planted(planted(), "odds", seed=0))
    suspects = tables.suspect_table(SPLITS, findings, "odds")
    for name in ("one", "two"):
        tables.write_tables(tmp_path / name, suspects, detection, calibration)
        figures.draw(tmp_path / name, suspects, SPLITS, calibration, "title", 5)
    galleries = {f"suspects_{name}.png" for name in SPLITS}
    expected = {"suspects.parquet", "detection.csv", "calibration.csv", "calibration.png", *galleries}
    assert {path.name for path in (tmp_path / "one").iterdir()} == expected
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    metrics = tables.measure(findings, SPLITS, detection, calibration, "odds")
    assert metrics["train/expected_errors_low"] <= metrics["train/expected_errors"]
    assert metrics["uniform/auroc"] == metrics["uniform/odds/auroc"] > 0.95
