"""The logged checkpoint is verified when it is read, and trains on to the bits of an uninterrupted training."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from factories import ROOT, SHAPE, dataset_info, make_engine, random_split, run_keys, run_training, train_config
from fuzzing import refusal
from ruamel.yaml import YAML

from gradtrail.core.train.history import on_host
from gradtrail.core.train.step import TrainState
from gradtrail.stages.common.params import as_written
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.data_files import SPLITS, write_processed
from gradtrail.stages.model.weights import WeightsInfo, write_weights
from gradtrail.stages.train.checkpoints import state_on_host
from gradtrail.tracking.checkpoints import load_checkpoint, save_checkpoint
from gradtrail.tracking.store import experiment_id, open_store


def bits(state: TrainState) -> list[tuple[Any, bytes]]:
    return [(leaf.dtype, leaf.tobytes()) for leaf in jax.tree.leaves(state_on_host(state))]


def make_weights(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"layers": {0: {"kernel": rng.normal(size=(400, 3)).astype(np.float32), "bias": np.zeros(3, np.float32)}}}


def make_state(**changed: Any) -> TrainState:
    state = TrainState(
        step=np.int32(5),
        params=make_weights(0),
        opt_state=(optax.EmptyState(), optax.TraceState(make_weights(1))),
        keys=run_keys(3),
        average=None,
        loss_scale=None,
    )
    return jax.device_put(dataclasses.replace(state, **changed))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a state."""
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    save_checkpoint(folder, make_state())
    return folder


@pytest.mark.parametrize("average", [None, make_weights(2)], ids=["last", "averaged"])
def test_a_loaded_state_is_the_saved_one_to_the_bit(average: Any, tmp_path: Path) -> None:
    state = make_state(average=average)
    save_checkpoint(tmp_path / "checkpoint", state)
    loaded = load_checkpoint(tmp_path / "checkpoint", make_state(average=average, step=np.int32(0)))
    assert bits(loaded) == bits(state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"keys": jax.tree.map(lambda key: jax.random.split(key, 2), run_keys(0))},
            "leaf keys/augmentation is uint32(2,), this training has uint32(2, 2)",
        ),
        ({"average": make_weights(0)}, "leaf average/layers/0/bias is absent, this training has float32(3,)"),
    ],
)
def test_the_checkpoint_of_another_training_is_refused_by_leaf_and_both_shapes(
    changed: dict[str, Any], reason: str, good: Path
) -> None:
    line = refusal(lambda: load_checkpoint(good, make_state(**changed)))
    assert line == f"{good}: no checkpoint of this training: {reason}"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def load_and_compare(folder: Path) -> None:
    assert bits(load_checkpoint(folder, make_state())) == bits(make_state())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax' threads
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_file_is_harmless_or_refused(damage: Callable[[Path], None], good: Path, tmp_path: Path) -> None:
    refused = 0
    for number, file in enumerate(sorted(path for path in good.rglob("*") if path.is_file())):
        copy = shutil.copytree(good, tmp_path / str(number))
        damage(copy / file.relative_to(good))
        line = refusal(lambda copy=copy: load_and_compare(copy))
        assert line is None or line.startswith(f"{copy}: ")
        refused += line is not None
    assert refused >= 3


SPLIT = random_split(10)
SHORT = train_config(schedule="constant", optimizer="adamw", average_decay=0.9)


@pytest.fixture
def finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that has the checkpoint of `SHORT`, in a folder with its final weights, params and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    (tmp_path / "params.yaml").touch()
    runtime = read_yaml(ROOT / "params.yaml")["runtime"]
    sections = {"train": json.loads(json.dumps(as_written(SHORT))), "runtime": runtime}
    YAML().dump(sections, tmp_path / "params.yaml")
    (tmp_path / "data").mkdir()
    write_processed(tmp_path / "data/processed", dict.fromkeys(SPLITS, SPLIT), dataset_info())
    client = open_store()
    run = client.create_run(experiment_id(client, "models"))
    engine, examples = make_engine(SHORT, SPLIT)
    state = run_training(engine, examples)[-1].state
    weights = on_host(state.evaluation_params)
    info = WeightsInfo(
        model=SHORT.model_config(SHAPE, 3),
        loss=SHORT.loss,
        dataset=dataset_info(),
        epoch=SHORT.epochs,
    )
    write_weights(tmp_path / "models/final.safetensors", weights, info)
    save_checkpoint(tmp_path / "saved", state)
    client.log_artifacts(run.info.run_id, str(tmp_path / "saved"), "checkpoint")
    return run.info.run_id


def test_the_snippet_of_the_docs_trains_on_to_the_bits_of_an_uninterrupted_training(
    finished_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/pipeline.md").read_text(encoding="utf-8")
    snippet = page.split("```python\n")[1].split("```")[0]
    left: dict[str, Any] = {}
    exec(snippet.replace("0123456789abcdef" * 2, finished_run), left)  # noqa: S102 - of our own page
    straight = run_training(left["training"], left["examples"])
    assert bits(left["state"]) == bits(straight[-1].state)
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == f"step 12, loss {straight[-1].records.metrics['loss'][-1]:.4f}"
    assert len(output) == 2, "one for each epoch"
