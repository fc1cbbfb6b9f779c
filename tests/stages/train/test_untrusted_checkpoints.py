"""Checkpoints that are damaged, half written or another training's: the one before is used, and a line says why."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import STATE, load, make_chunk, names, save
from untrusted import MAX_BYTES, on_linux, taken_bytes

from gradtrail.core.train.history import History
from gradtrail.stages.common.digests import digest
from gradtrail.stages.train.checkpointing import Progress, ResumeFolder


@pytest.fixture
def written(tmp_path: Path, good: Path) -> Path:
    """A folder with the checkpoints after the steps 4 and 5."""
    return shutil.copytree(good, tmp_path / STATE)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / STATE
    save(ResumeFolder(folder, 0.0, lambda: 0.0), 4, 5)
    return folder


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def enlarge(path: Path) -> None:
    with path.open("ab") as stream:
        stream.truncate(10**8)


@on_linux
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, enlarge])
def test_for_a_damaged_one_the_one_before_is_used_and_orbax_opens_only_that(
    damage: Callable[[Path], None],
    written: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from orbax.checkpoint import v1 as ocp

    opened: list[str] = []
    real = ocp.load_checkpointables
    monkeypatch.setattr(ocp, "load_checkpointables", lambda path, *rest: opened.append(path.name) or real(path, *rest))
    damage(largest_file(written / "step_000000005"))
    found: list[Progress | None] = []
    assert taken_bytes(lambda: found.append(load(written))) < MAX_BYTES
    assert found[0] is not None
    assert found[0].step == 4
    assert opened == ["step_000000004"]
    assert capfd.readouterr().err.splitlines() == [
        "train: skipping the checkpoint step_000000005: its files, step or training do not match its seal",
    ]
    assert names(written) == ["step_000000004", "step_000000004.digest"], "it would be in the way of the next"


@pytest.mark.parametrize("seal", [None, b"", b"\xff", b"x" * 100_000, b"0" * 32 + b".dir"])
def test_one_without_its_seal_is_skipped(seal: bytes | None, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written / "step_000000005.digest"
    path.unlink() if seal is None else path.write_bytes(seal)
    found = load(written)
    assert found is not None
    assert found.step == 4
    assert "it has no seal" in capsys.readouterr().err or seal is not None


def test_what_a_killed_process_left_half_done_does_no_harm(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A write, a seal without its folder, one that was being removed; and one of the format before."""
    (written / "step_000000006.orbax-checkpoint-tmp").mkdir()
    (written / "step_000000002.digest").write_text("of a folder that is gone")
    shutil.copytree(written / "step_000000004", written / "step_000000003")
    (written / "step_000000003/_CHECKPOINT_METADATA").unlink()
    shutil.copytree(written / "step_000000004", written / "step_000000007")
    (written / "step_000000007.digest").write_text(digest(written / "step_000000007"))
    found = load(written)
    assert found is not None
    assert found.step == 5
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("train: skipping the checkpoint step_000000007: ")
    save(ResumeFolder(written, 0.0, lambda: 0.0), 6, 7)
    assert capsys.readouterr().err == ""
    assert names(written) == [f"step_00000000{n}{end}" for n in (6, 7) for end in ("", ".digest")]


def test_one_of_another_training_is_not_used(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(written, tmp_path / "cd34-cpu1")
    assert load(other) is None
    assert capsys.readouterr().err.count("train: skipping the checkpoint step_") == 2
    assert names(other) == []


def test_a_bug_while_one_is_loaded_is_raised(written: Path) -> None:
    def broken(_: object) -> History:
        raise KeyError("a bug")

    like = make_chunk(1)
    with pytest.raises(KeyError, match="a bug"):
        ResumeFolder(written, 0.0, lambda: 0.0).load(like.state, like.records, broken)
    assert "step_000000005" in names(written)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_seal_whose_checkpoint_is_gone_is_removed(
    is_folder: bool, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(written / "step_000000005")
    if is_folder:
        (written / "step_000000005.digest").unlink()
        (written / "step_000000005.digest").mkdir()
    assert load(written).step == 4
    assert names(written) == ["step_000000004", "step_000000004.digest"]
    save(ResumeFolder(written, 0.0, lambda: 0.0), 5)
    assert names(written) == [f"step_00000000{n}{end}" for n in (4, 5) for end in ("", ".digest")]
    assert "warning" not in capsys.readouterr().err


def test_a_folder_in_the_place_of_a_seal_is_in_nobodys_way(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ResumeFolder(written, 0.0, lambda: 0.0)
    (written / "step_000000006.digest/inside").mkdir(parents=True)
    save(folder, 6)
    assert capsys.readouterr().err == ""
    (written / "step_000000006.digest").unlink()
    (written / "step_000000006.digest").mkdir()
    assert load(written).step == 5
    assert names(written) == ["step_000000005", "step_000000005.digest"]
