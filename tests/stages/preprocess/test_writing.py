"""The training split with its versions is the same in whole arrays and in shards; small classes are named."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from factories import dataset_info, preprocess_config, random_split
from matplotlib.figure import Figure

from gradtrail.core.data import Split
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.artifacts import splits as reading
from gradtrail.stages.artifacts.shards import ShardedSplit
from gradtrail.stages.artifacts.splits import (
    InMemorySource,
    open_train,
    read_sample,
    read_split,
    read_splits,
    require_undeformed,
)
from gradtrail.stages.common.dataset import DatasetInfo, read_info
from gradtrail.stages.preprocess import figures, small_classes
from gradtrail.stages.preprocess.writing import write
from gradtrail.support.errors import UserError

SPLITS = {
    name: dataclasses.replace(random_split(9), true_labels=np.zeros(9, np.int32))
    for name in ("train", "validation", "test")
}


def written(folder: Path, **overrides: int | None) -> tuple[DatasetInfo, dict[str, float]]:
    metrics = write(folder, SPLITS, dataset_info(), preprocess_config(**overrides), num_ids=20)
    return read_info(folder), metrics


def columns(split: Split) -> list[list]:
    return [getattr(split, field.name).tolist() for field in dataclasses.fields(Split)]


@pytest.mark.parametrize("deformations", [1, 3])
def test_shards_equal_whole_arrays(tmp_path: Path, deformations: int) -> None:
    whole, measured = written(tmp_path / "whole", deformations=deformations)
    sharded, other = written(tmp_path / "sharded", deformations=deformations, shard_mib=1)
    assert (tmp_path / "sharded/train.npz").is_dir()
    left, right = read_splits(tmp_path / "whole", whole), read_splits(tmp_path / "sharded", sharded)
    assert [columns(left[name]) for name in left] == [columns(right[name]) for name in right]
    assert whole.examples == sharded.examples
    assert [whole.examples[name] for name in SPLITS] == [9 * deformations, 9, 9]
    assert measured == pytest.approx(other, rel=1e-12)
    assert measured["noisy_labels"] == deformations * np.sum(SPLITS["train"].labels != 0)


def test_training_takes_shards_into_memory_or_in_parts_and_sees_the_same(tmp_path: Path) -> None:
    info, _ = written(tmp_path / "data", shard_mib=1, deformations=2)
    path = tmp_path / "data/train.npz"
    held = open_train(path, info, stream_above_mib=1, private=False)
    read = open_train(path, info, stream_above_mib=0, private=False)
    assert isinstance(held, InMemorySource)
    assert isinstance(read, ShardedSplit)
    assert len(held) == len(read) == 18
    read_id = read.read_column("example_id")
    for left, right in zip((*held.read(7, 12), held.example_id), (*read.read(7, 12), read_id), strict=True):
        np.testing.assert_array_equal(left, right)


def test_private_training_has_shards_in_whole_arrays(tmp_path: Path) -> None:
    info, _ = written(tmp_path / "data", shard_mib=1)
    whole = open_train(tmp_path / "data/train.npz", info, stream_above_mib=1, private=True)
    assert isinstance(whole, Split)
    assert columns(whole) == columns(read_split(tmp_path / "data/train.npz", info))


def test_private_training_of_streamed_split_is_refused(tmp_path: Path) -> None:
    info, _ = written(tmp_path / "data", shard_mib=1)
    with pytest.raises(UserError, match=r"^train.privacy.enabled: .* runtime.stream_above_mib is 0; .*train.npz"):
        open_train(tmp_path / "data/train.npz", info, stream_above_mib=0, private=True)


def test_versions_are_no_examples_of_their_own_to_a_private_training_or_an_audit(tmp_path: Path) -> None:
    info, _ = written(tmp_path / "data", deformations=3)
    assert info.versions == 3
    with pytest.raises(UserError, match=r"^train.privacy.enabled: .*augmentation_multiplicity"):
        open_train(tmp_path / "data/train.npz", info, stream_above_mib=1, private=True)
    with pytest.raises(UserError, match=r"^audit: .*preprocess.deformations"):
        require_undeformed(info, "audit")
    plain, _ = written(tmp_path / "plain")
    assert plain.versions == 1
    require_undeformed(plain, "audit")


def test_of_a_large_split_a_sample_is_taken_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SAMPLE", 6)
    for name, shard_mib in (("whole", None), ("sharded", 1)):
        info, _ = written(tmp_path / name, shard_mib=shard_mib, deformations=2)
        sample, rows = read_sample(tmp_path / name / "train.npz", info)
        assert rows.tolist() == [0, 3, 6, 9, 12, 15]
        assert sample.example_id.tolist() == [0, 3, 6, 20, 23, 26]
    monkeypatch.setattr(reading, "SAMPLE", 18)
    sample, rows = read_sample(tmp_path / "sharded/train.npz", info)
    assert rows.tolist() == list(range(18))


def test_classes_of_one_training_example_or_none_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    small_classes.warn(np.array([0, 0, 2, 3, 3]), 5, versions=1)
    assert capsys.readouterr().err == (
        "preprocess: classes with fewer than two training examples: 1 (0), 2 (1), 4 (0); `gradients` leaves them out "
        "of coherence_within_classes, and classes.csv has no coherence of such a class with itself\n"
    )


def test_two_versions_of_an_example_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    small_classes.warn(np.array([0, 1]), 2, versions=2)
    small_classes.warn(np.array([0, 0, 1, 1]), 2, versions=1)
    assert not capsys.readouterr().err


def test_of_many_classes_the_first_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: dict[str, Figure] = {}
    monkeypatch.setattr(plotting, "save", lambda figure, path: saved.update({path.name: figure}))
    splits = {name: random_split(60, num_classes=256) for name in ("train", "test")}
    figures.draw(tmp_path, splits, "idx", 256)
    rows, height = plotting.MAX_CLASSES, splits["train"].images.shape[1]
    assert len(np.asarray(saved["samples.png"].axes[0].images[0].get_array())) == rows * height
    assert saved["samples.png"].get_suptitle() == "Training examples by label, the first 20 of 256 (idx)"
