"""The pictures of `benchmarks.pictures`: verified packages, and splits that share no picture."""

from pathlib import Path

import pytest

from benchmarks import pictures


def names(folder: Path, split: str) -> set[str]:
    return {f"{path.parent.name} {path.read_text()}" for path in folder.glob(f"{split}/*/*")}


def test_splits_share_no_picture_and_smaller_counts_are_parts_of_larger_ones(tmp_path: Path) -> None:
    classes: dict[str, list[Path]] = {"many": [], "few": []}
    for name, count in (("many", 60), ("few", 9)):
        for number in range(count):
            path = tmp_path / "source" / str(number) / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {number}")
            classes[name].append(path)
    for name, options in {"10": {"count": 10}, "all": {}, "choice": {"is_choice": True}}.items():
        pictures.write_pictures(tmp_path / name, classes, **options)
    train, test = names(tmp_path / "all", "train"), names(tmp_path / "all", "test")
    assert (len(train), len(test)) == (40 + 6, 20 + 3)
    assert not train & test
    assert names(tmp_path / "10", "train") < train
    assert len(names(tmp_path / "10", "train")) == 10 + 6
    assert names(tmp_path / "10", "test") == test
    assert names(tmp_path / "choice", "test") | names(tmp_path / "choice", "train") == train
    assert len(names(tmp_path / "choice", "test")) == 10 + 2


def test_package_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "private_folder", lambda: tmp_path)
    monkeypatch.setattr(pictures, "APT", ("touch archive.deb", "tar -tf {archive}"))
    with pytest.raises(SystemExit, match=r"archive.deb: SHA-256 is e3b0c442\w+, expected 39e172fe\w+"):
        pictures.unpacked(pictures.FASHION)
    assert not [*(tmp_path / "benchmarks").iterdir()]
