"""One pass writes the scores of every example in parts."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from factories import random_split

from gradtrail.core.xla.compiler import NO_COST, NO_TIMES, CompiledFunction
from gradtrail.core.xla.passes import Pass
from gradtrail.stages.gradients import every_example
from gradtrail.stages.gradients.every_example import score_every_example

SPLIT = random_split(50)


class Passes:
    """Scores that follow from the pixels, in place of compiled ones."""

    def __init__(self) -> None:
        def function(params: Any, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
            norms = images.reshape(len(images), -1).sum(axis=1).astype(np.float32) * params
            return {"grad_norm": norms, "predicted": (images[:, 0, 0] % 3).astype(np.int32)}

        compiled = CompiledFunction(name="score", call=function, cost=NO_COST, times=NO_TIMES)
        self.score = Pass(function=compiled, batch_size=4)


def scored(path: Path, split: Any) -> dict[str, float]:
    passes: Any = Passes()
    params: Any = np.float32(0.5)
    return score_every_example(passes, params, split, path)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_example, "_PART", 10)  # 12, in whole batches


def test_every_example_has_its_scores_in_the_order_of_the_split(tmp_path: Path) -> None:
    result = scored(tmp_path / "a.parquet", SPLIT)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [12, 12, 12, 12, 2]
    table = file.read().to_pandas()
    norms = SPLIT.images.reshape(50, -1).sum(axis=1) * 0.5
    correct = SPLIT.images[:, 0, 0] % 3 == SPLIT.labels
    assert list(table) == ["example_id", "label", "true_label", "grad_norm", "predicted", "correct"]
    np.testing.assert_array_equal(table["example_id"], SPLIT.example_id)
    np.testing.assert_array_equal(table["grad_norm"], norms)
    np.testing.assert_array_equal(table["correct"], correct)
    expected = {"grad_norm_mean": norms.mean(), "grad_norm_std": norms.std(), "grad_norm_max": norms.max()}
    expected |= {"examples": 50, "misclassified": 1 - correct.mean()}
    assert result == pytest.approx({f"every_example/{name}": value for name, value in expected.items()})
