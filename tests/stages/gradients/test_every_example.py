"""One pass writes the scores of every example in parts: those of the whole split, from memory or shards."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from factories import SHAPE, dataset_info, random_split

from gradtrail.core.data import Split
from gradtrail.core.gradients.passes import Pass
from gradtrail.stages.artifacts.shards import ShardedSplit, write_shards
from gradtrail.stages.artifacts.splits import InMemorySource
from gradtrail.stages.common.dataset import sha256
from gradtrail.stages.gradients import every_example
from gradtrail.stages.gradients.every_example import score_every_example

SPLIT = random_split(50)


class Passes:
    """Scores that follow from the pixels, in place of compiled ones."""

    def __init__(self) -> None:
        def function(params: Any, batch: tuple[np.ndarray, np.ndarray]) -> tuple[Any, dict[str, np.ndarray]]:
            images, _ = batch
            norms = images.reshape(len(images), -1).sum(axis=1).astype(np.float32) * params
            return (), {"grad_norm": norms, "predicted": (images[:, 0, 0] % 3).astype(np.int32)}

        compiled: Any = function
        self.score = Pass(function=compiled, batch_size=4)

    def place(self, params: Any) -> Any:
        return params


def scored(path: Path, split: Any) -> dict[str, float]:
    passes: Any = Passes()
    params: Any = np.float32(0.5)
    return score_every_example(passes, params, split, path)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_example, "_PART", 10)  # 12, in whole batches


@pytest.fixture
def sharded(tmp_path: Path) -> ShardedSplit:
    write_shards(tmp_path / "train.npz", [SPLIT], 1)
    return ShardedSplit(
        tmp_path / "train.npz",
        dataset_info(image_shape=SHAPE, files={"train.npz": sha256(tmp_path / "train.npz/index.json")}),
    )


def test_every_example_has_its_scores_in_the_order_of_the_split(tmp_path: Path) -> None:
    result = scored(tmp_path / "a.parquet", InMemorySource(SPLIT))
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


def test_from_shards_come_the_same_bytes(tmp_path: Path, sharded: ShardedSplit) -> None:
    assert scored(tmp_path / "a.parquet", InMemorySource(SPLIT)) == scored(tmp_path / "b.parquet", sharded)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_at_most_two_parts_are_read_ahead(tmp_path: Path) -> None:
    reads: list[int] = []
    done: list[int] = []

    class Counting(InMemorySource):
        def read_split(self, start: int, stop: int) -> Split:
            reads.append(start)
            return super().read_split(start, stop)

    def ahead(count: int) -> None:
        done.append(count)
        assert len(reads) <= len(done) + 2

    passes: Any = Passes()
    params: Any = np.float32(1)
    score_every_example(passes, params, Counting(SPLIT), tmp_path / "a.parquet", advance=ahead)
    assert sum(done) == 50
