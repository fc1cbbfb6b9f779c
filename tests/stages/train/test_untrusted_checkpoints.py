"""Checkpoints that were damaged or forged, and sealed again: told of in one line and passed over, at no cost."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from factories import make_engine, random_split, run_training, train_config
from hypothesis import given
from hypothesis import strategies as st
from untrusted import MAX_BYTES, damaged, fuzz, on_linux, refusal, taken_bytes

from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.step import TrainState
from gradtrail.stages.common.digests import digest
from gradtrail.stages.train.checkpointing import Progress, ResumeFolder
from gradtrail.tracking.mlflow.checkpoints import load_checkpoint, save_checkpoint

CONFIG, SPLIT = train_config(epochs=3), random_split(10)
NAME = "step_000000004"
MAX_TOLD = 300


@pytest.fixture(scope="module")
def state() -> TrainState:
    engine, examples = make_engine(CONFIG, SPLIT)
    return run_training(engine, examples, steps_per_call=4)[1].state


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint after step 4, of an epoch under way."""
    folder = tmp_path_factory.mktemp("good")
    engine, examples = make_engine(CONFIG, SPLIT)
    chunks = run_training(engine, examples, steps_per_call=1)
    history = History(CONFIG.keep_epochs, on_host(chunks[0].state.params))
    history.add(chunks[2], on_host(chunks[2].state.params), {"loss": 1.0, "accuracy": 0.5})
    ResumeFolder(folder, 0.0, lambda: 0.0).save(chunks[3], history, seconds=1.0)
    assert load(folder).step == 4
    return folder


@functools.cache
def like() -> tuple[TrainState, Any]:
    engine, _ = make_engine(CONFIG, SPLIT)
    return engine.init(jax.random.key(0)), engine.records()


def load(folder: Path) -> Progress | None:
    state, records = like()
    history_of = functools.partial(History.from_arrays, CONFIG.keep_epochs, on_host(state.params))
    return ResumeFolder(folder, 0.0, lambda: 0.0).load(state, records, history_of)


def loaded_or_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Load a folder whose checkpoint is sealed again; return the one line that is said of it."""
    (folder / f"{NAME}.digest").write_text(digest(folder / NAME))
    capfd.readouterr()
    progress = load(folder)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert len(told[0]) <= MAX_TOLD
    assert told[0].startswith("train: going on after step" if progress else f"train: {NAME} is no whole checkpoint (")
    return told[0]


def files(folder: Path) -> list[Path]:
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@fuzz(60)
@given(data=st.data())
def test_a_damaged_checkpoint_that_was_sealed_again_is_loaded_or_passed_over(
    tmp_path: Path, good: Path, capfd: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    folder = shutil.copytree(good, tmp_path / "copy", dirs_exist_ok=True)
    shutil.rmtree(folder / NAME)
    shutil.copytree(good / NAME, folder / NAME)
    path = data.draw(st.sampled_from(files(folder / NAME)))
    if data.draw(st.integers(0, 9)):
        path.write_bytes(data.draw(damaged(path.read_bytes() or b"\0")))
    else:
        path.unlink()
    loaded_or_told(folder, capfd)


def kvstore(checkpoint: Path, name: str) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{name}/"}


def forge(checkpoint: Path, array: str, **changed: Any) -> None:
    """Change what a checkpoint says of one of its arrays."""
    store = ts.KvStore.open(kvstore(checkpoint, array)).result()
    content = json.loads(store.read("zarr.json").result().value)
    store.write("zarr.json", json.dumps(content | changed).encode()).result()


def grid(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def codecs(*inner: int) -> list[dict[str, Any]]:
    """Pieces of this shape in one file, as Orbax has them."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    index = [little, {"name": "crc32c"}]
    configuration = {"chunk_shape": list(inner), "codecs": [little], "index_codecs": index}
    return [{"name": "sharding_indexed", "configuration": configuration}]


PLAIN = [{"name": "bytes", "configuration": {"endian": "little"}}]
ZSTD = [*PLAIN, {"name": "zstd", "configuration": {"level": 1}}]
EPOCHS = "history.epochs"  # of 1 row of 5 figures, whose shape nobody expects
FORGED: dict[str, dict[str, Any]] = {
    "many rows": {"shape": [10**9, 5]},
    "more than there is": {"shape": [10**15, 10**15]},
    "many rows of large pieces": {"shape": [10**9, 5], "chunk_grid": grid(10**9, 5), "codecs": PLAIN},
    "large pieces": {"chunk_grid": grid(10**9, 5), "codecs": PLAIN},
    "large pieces, packed": {"chunk_grid": grid(10**9, 5), "codecs": ZSTD},
    "many pieces in one": {"chunk_grid": grid(10**9, 5), "codecs": codecs(1, 1)},
    "pieces of nothing": {"chunk_grid": grid(0, 0)},
    "a negative shape": {"shape": [-1, 5]},
    "no shape": {"shape": None},
    "another dtype": {"data_type": "complex128"},
    "another number of dimensions": {"shape": [5], "chunk_grid": grid(5), "codecs": codecs(5)},
}


@on_linux
@pytest.mark.parametrize("name", FORGED)
def test_what_a_checkpoint_claims_takes_no_memory(
    name: str, tmp_path: Path, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(good, tmp_path / "copy")
    forge(folder / NAME, EPOCHS, **FORGED[name])
    told: list[str] = []
    assert taken_bytes(lambda: told.append(loaded_or_told(folder, capfd))) < MAX_BYTES
    assert "is no whole checkpoint" in told[0]


@pytest.mark.parametrize("name", ["step", "state.0000", "history.steps.loss", "history.final.params.0000"])
def test_arrays_of_another_shape_are_passed_over(
    name: str, tmp_path: Path, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(good, tmp_path / "copy")
    spec = {"driver": "zarr3", "kvstore": kvstore(folder / NAME, name)}
    ts.open(spec, create=True, delete_existing=True, dtype=ts.float32, shape=(7,)).result().write(
        np.ones(7, np.float32)
    ).result()
    assert "is no whole checkpoint" in loaded_or_told(folder, capfd)


def test_a_step_that_is_not_that_of_the_state_is_passed_over(
    tmp_path: Path, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(good, tmp_path / "copy")
    ts.open({"driver": "zarr3", "kvstore": kvstore(folder / NAME, "step")}, open=True).result().write(10**9).result()
    assert "is no whole checkpoint (it says step 1000000000" in loaded_or_told(folder, capfd)


@pytest.mark.parametrize(
    "seal", [b"", b"\xff", b"x" * 100_000, b"0" * 32 + b".dir"], ids=["empty", "no text", "long", "another"]
)
def test_a_seal_that_is_none_is_told_of(
    seal: bytes, tmp_path: Path, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(good, tmp_path / "copy")
    (folder / f"{NAME}.digest").write_bytes(seal)
    assert load(folder) is None
    assert len(capfd.readouterr().err.splitlines()) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize("damage", [cut, replace, Path.unlink])
def test_a_damaged_checkpoint_of_a_state_is_refused(
    damage: Callable[[Path], None], tmp_path: Path, state: TrainState
) -> None:
    save_checkpoint(tmp_path / "checkpoint", state)
    for path in (tmp_path / "checkpoint" / "state").rglob("manifest.ocdbt"):
        damage(path)
    line = refusal(lambda: load_checkpoint(tmp_path / "checkpoint", like=state))
    assert (line or "").startswith(f"{tmp_path / 'checkpoint'}: no checkpoint of this state: ")


@on_linux
@pytest.mark.parametrize("name", FORGED)
def test_what_the_checkpoint_of_a_state_claims_takes_no_memory(name: str, tmp_path: Path, state: TrainState) -> None:
    checkpoint = tmp_path / "checkpoint"
    save_checkpoint(checkpoint, state)
    forge(checkpoint, "params.layers.0.kernel", **FORGED[name])
    assert taken_bytes(lambda: refusal(lambda: load_checkpoint(checkpoint, like=state))) < MAX_BYTES
    assert refusal(lambda: load_checkpoint(checkpoint, like=state))


def test_a_folder_that_is_no_checkpoint_of_a_state_is_refused(tmp_path: Path, state: TrainState) -> None:
    assert refusal(lambda: load_checkpoint(tmp_path / "nowhere", like=state))
    assert refusal(lambda: load_checkpoint(tmp_path, like=state))
