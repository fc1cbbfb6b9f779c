"""A private training to publish writes nothing that was computed from its examples without noise."""

import copy
import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from factories import make_engine, random_split, seed_keys, train_config

from gradtrail.core.train.history import History, on_host
from gradtrail.core.train.loop import train
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.stages.train import figures, tables
from gradtrail.stages.train.release import redacted_history
from gradtrail.tracking.mlflow import artifacts as curve_tables

IDS = np.arange(100, 110, dtype=np.int32)
PRIVATE = dataclasses.replace(NOT_PRIVATE, enabled=True)
PUBLISHED = dataclasses.replace(PRIVATE, release=True, secret_sha256="0" * 64)
WRITTEN = ("epochs.csv", "steps.parquet", "dynamics.parquet", "learning_curves.png", "steps.png", "parameters.csv")


@pytest.fixture(scope="module")
def history() -> History:
    engine, examples = make_engine(train_config(), random_split(10))
    history = History((0, 1), on_host(engine.init(seed_keys(0)).params))
    for chunk in train(engine, engine.init(seed_keys(0)), examples, steps_per_call=3):
        if chunk.ends_epoch:
            history.add(chunk, on_host(chunk.state.params), {"loss": 1.0, "accuracy": 1 / 3})
    return history


def with_other_examples(history: History) -> History:
    """The same training as far as the noise covers it, on other examples."""
    changed = copy.deepcopy(history)
    changed.epochs = [
        dataclasses.replace(record, loss=9.0, cross_entropy=8.0, accuracy=0.25) for record in changed.epochs
    ]
    for name in ("loss", "cross_entropy", "accuracy"):
        changed.steps = [dataclasses.replace(part, **{name: getattr(part, name) + 1}) for part in changed.steps]
    changed.steps = [dataclasses.replace(part, num_examples=part.num_examples + 1) for part in changed.steps]
    assert changed.dynamics is not None
    changed.dynamics.forgetting_events += 1
    changed.dynamics._sum += 0.25
    return changed


def write(history: History, folder: Path, *, drawn: bool = False) -> dict[str, str]:
    tables.write_tables(folder, history, IDS)
    if drawn:
        figures.draw(folder, tables.epoch_table(history.epochs), tables.step_table(history.steps), "a title", None)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_published_files_do_not_depend_on_examples(history: History, tmp_path: Path) -> None:
    both = history, with_other_examples(history)
    ours, theirs = (
        write(redacted_history(one, PUBLISHED), tmp_path / str(n), drawn=True) for n, one in enumerate(both)
    )
    assert ours == theirs
    assert set(ours) == set(WRITTEN)
    ours, theirs = (write(redacted_history(one, PRIVATE), tmp_path / f"{n} of before") for n, one in enumerate(both))
    assert {name for name in ours if ours[name] != theirs[name]} == {"epochs.csv", "steps.parquet", "dynamics.parquet"}
    assert redacted_history(history, NOT_PRIVATE) is history
    metrics = tables.measure(redacted_history(both[0], PUBLISHED), train_config(), 6)
    assert metrics == tables.measure(redacted_history(both[1], PUBLISHED), train_config(), 6)
    assert {"loss", "cross_entropy", "accuracy"} == {*tables.measure(history, train_config(), 6)} - {*metrics}
    assert metrics["validation_accuracy"] == 1 / 3


def test_tables_to_publish_have_their_schema(history: History, tmp_path: Path) -> None:
    for privacy, name in ((NOT_PRIVATE, "all"), (PUBLISHED, "published")):
        write(redacted_history(history, privacy), tmp_path / name)
    for name in ("dynamics.parquet", "steps.parquet"):
        schemas = [pq.read_schema(tmp_path / folder / name) for folder in ("all", "published")]
        assert schemas[0].equals(schemas[1]), name
    assert len(pd.read_parquet(tmp_path / "published/dynamics.parquet")) == 0
    whole, blank = (pd.read_csv(tmp_path / folder / "epochs.csv") for folder in ("all", "published"))
    assert list(whole) == list(blank)
    pd.testing.assert_frame_equal(whole.iloc[:, 4:], blank.iloc[:, 4:])
    assert history.dynamics is not None
    assert len(history.dynamics.forgetting_events) == 10, "the history itself is as before"


def test_curves_to_publish_have_no_losses_of_examples(history: History, tmp_path: Path) -> None:
    write(redacted_history(history, PUBLISHED), tmp_path)
    curves = curve_tables.curves(*curve_tables.read_tables(tmp_path), 6)
    names = {name for name, points in curves.items() if points}
    assert names == {"train/validation_loss", "train/validation_accuracy", "steps/grad_norm", "steps/learning_rate"}
