"""A stopped training ends with the bits of one that was not; members are what trainings by themselves would be."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from exports import random_params
from factories import ROOT, SHAPE, dataset_info, make_engine, new_compiler, random_split, split_of, train_config
from safetensors.numpy import save_file
from scipy import stats

from gradtrail.core.config import ConfigError
from gradtrail.core.data import Split, channel_statistics
from gradtrail.core.nn.inference import compile_predict_within, validate
from gradtrail.core.nn.losses import Focal
from gradtrail.core.nn.mlp import MLP
from gradtrail.core.nn.models import Model, by_path, num_parameters
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.train.changes import NO_CHANGES
from gradtrail.core.train.config import VARIED, MemberSeeds, TrainConfig
from gradtrail.core.train.history import EPOCH_METRICS, EpochMetrics, History
from gradtrail.core.train.keys import keys_of
from gradtrail.core.train.loop import Chunk
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.train.start import StartConfig
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.params import load_section
from gradtrail.stages.data.changes import as_trained
from gradtrail.stages.data.data_files import SPLITS, write_processed
from gradtrail.stages.gradients.inputs import DYNAMICS, read_dynamics, read_trajectory
from gradtrail.stages.model.members import over_members, read_folders, read_seeds, spread
from gradtrail.stages.model.weights import read_weights
from gradtrail.stages.train import figures, tables
from gradtrail.stages.train import training as training_module
from gradtrail.stages.train.checkpoints import Checkpoints, state_on_host
from gradtrail.stages.train.outputs import Outputs
from gradtrail.stages.train.training import NullListener, Training, TrainResult
from gradtrail.support import memory
from gradtrail.support.errors import UserError
from gradtrail.support.signals import Stopped

FIRST_AND_FINAL = ("epochs/000.safetensors", "final.safetensors")
SPLIT = random_split(10)  # three steps an epoch
MUCH = train_config(
    model=MLP(hidden=(5,), activation="relu", dropout=0.5),
    optimizer="adam",
    average_decay=0.9,
    precision="float16",
    accumulation_steps=2,
    epochs=3,
)
EPSILONS = (0.5, 0.75, 1.0)
SECRET = "correct horse battery staple, and more"  # noqa: S105
PRIVATE = train_config(epochs=3, privacy=dataclasses.replace(NOT_PRIVATE, enabled=True))


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time; those of a stage are drawn in `tests/pipeline`."""
    monkeypatch.setattr(figures, "draw", lambda *_: None)


class Listener(NullListener):
    """Asks the process to stop after some of the chunks of a network, as Ctrl-C does."""

    def __init__(self, chunks: int | None = None, folder: Path | None = None):
        self.left = chunks
        self.folder = folder
        self.epochs: list[int] = []

    @contextlib.contextmanager
    def member(self, training: Training, seeds: MemberSeeds) -> Iterator[Checkpoints]:
        yield Checkpoints(self.folder and self.folder / str(seeds), 1e9, lambda: 0.0)

    def after_epoch(self, history: History, seconds: float) -> None:
        self.epochs.append(history.epochs[-1]["epoch"])

    def diverged(self, chunk: Chunk) -> None:
        pytest.fail("diverged")


class StoppedTraining(Training):
    """A training whose listener asks it to stop; no epoch is better than the first."""

    def validate(self, params: Any) -> Callable[[], dict[str, float]]:
        return lambda: {"loss": float(np.abs(params["layers"][0]["kernel"]).sum()), "accuracy": 0.5}


def training_of(
    config: TrainConfig,
    listener: Listener,
    *,
    steps_per_call: int = 1,
    secret: str | None = None,
    stop_after_epoch: int | None = None,
    **fields: Any,
) -> Training:
    runtime = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
    training = StoppedTraining(
        config=config,
        runtime=dataclasses.replace(runtime, stop_after_epoch=stop_after_epoch),
        info=dataset_info(),
        train=SPLIT,
        validation=SPLIT,
        devices=jax.local_devices(),
        steps_per_call=steps_per_call,
        secret=secret,
        **fields,
    )
    engine, _ = make_engine(dataclasses.replace(config, seed=0, members=1, vary=VARIED, patience=None), SPLIT)

    def run_steps(*arguments: Any) -> Any:
        result = engine.run_steps(*arguments)
        if listener.left is not None:
            listener.left -= 1
            if listener.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return result

    training.compiled = copy.copy(engine)
    training.compiled.run_steps = run_steps
    return training


def test_processes_part_when_the_last_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax writes in another thread, and asks the other processes at its end."""
    events: list[str] = []
    monkeypatch.setattr(training_module, "leave", lambda: events.append("left"))
    monkeypatch.setattr(Checkpoints, "_wait", lambda _: events.append("waited"))
    config = dataclasses.replace(PRIVATE, privacy=NOT_PRIVATE, epochs=1)
    training_of(config, (listener := Listener(folder=tmp_path))).run(listener, lambda *_: events.append("trained"))
    assert events[-3:] == ["trained", "waited", "left"]


def run(config: TrainConfig, folder: Path | None, listener: Listener, **fields: Any) -> TrainResult:
    training = training_of(config, listener, **fields)
    return training.train_network(config.seeds_of(config.seed), Checkpoints(folder, 1e9, lambda: 0.0), listener)


def bits(result: TrainResult) -> dict[Any, bytes]:
    state = dict(enumerate(jax.tree.leaves(state_on_host(result.state))))
    return {name: np.asarray(leaf).tobytes() for name, leaf in (state | result.history.as_arrays()).items()}


def test_time_and_steps_of_a_stopped_training_and_of_its_resumption_are_counted(tmp_path: Path) -> None:
    trainings = []
    for chunks in (4, None):
        config, listener = train_config(epochs=3), Listener(chunks)
        trainings.append(training := training_of(config, listener))
        with contextlib.suppress(Stopped):
            training.train_network(config.seeds_of(config.seed), Checkpoints(tmp_path, 1e9), listener)
    (stopped,), (resumed,) = (training.stopwatch.attempts for training in trainings)
    assert [step for step, _ in stopped.networks["train"]] == [0, 4]
    assert [step for step, _ in resumed.networks["train"]] == [4, 9]
    in_loop = {"steps", "validation", "data_loading", "checkpoint_save", "checkpoint_restore"}
    assert all(in_loop <= attempt.seconds.keys() for attempt in (stopped, resumed))
    assert stopped.networks["train"][1][1] <= stopped.seconds["steps"]


def test_large_split_is_streamed_unless_the_training_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not training_of(train_config(), Listener()).is_streamed
    monkeypatch.setattr(training_module, "LARGEST_ON_DEVICE", SPLIT.images.nbytes - 1)
    assert training_of(train_config(), Listener()).is_streamed
    assert not training_of(PRIVATE, Listener()).is_streamed


def loaded(train: Split = SPLIT, batch_size: int = 4, config: TrainConfig | None = None, **fields: Any) -> Training:
    """The training of the data that it writes to the working directory, with changes or another config."""
    shutil.rmtree("data", ignore_errors=True)
    write_processed(Path("data/processed"), {**dict.fromkeys(SPLITS, SPLIT), "train": train}, dataset_info())
    config = config or train_config(batch_size=batch_size, changes=dataclasses.replace(NO_CHANGES, **fields))
    runtime = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
    inputs = SimpleNamespace(have_changed=lambda: False, require_data=lambda: None)
    environment = EnvironmentConfig(cpu_threads=2, xla_flags=(), processor="any")
    stage: Any = SimpleNamespace(
        params=lambda kind, *_: environment if kind is EnvironmentConfig else config, runtime=runtime, inputs=inputs
    )
    return Training.load(stage)


def test_numbers_of_the_training_split_replace_their_names_unless_the_training_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_module, "devices", lambda _: jax.local_devices())
    loss = Focal(gamma=2.0, class_weights="balanced")
    training = loaded(config=train_config(loss=loss, normalization="channels"))
    assert training.config.normalization == channel_statistics(SPLIT.images)
    assert training.model.config.normalization == training.config.normalization
    with pytest.raises(ConfigError, match=r"^train\.normalization must .* each of 1 channels, got 3 and 1 numbers"):
        loaded(config=train_config(normalization=((0.5, 0.5, 0.5), (0.2,))))
    counts = np.bincount(SPLIT.labels)
    assert training.config.loss == Focal(gamma=2.0, class_weights=tuple((10 / (3 * counts)).tolist()))
    with pytest.raises(UserError, match=r"^train\.focal\.class_weights must be empty or numbers with .*, got balanced"):
        loaded(config=dataclasses.replace(PRIVATE, loss=loss))


def test_training_from_weights_begins_with_them_in_every_member_and_after_each_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tables say so. What is drawn differs between members, which are refused if nothing else does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_module, "devices", lambda _: jax.local_devices())
    config = train_config(model=MLP(hidden=(5,), activation="relu", dropout=0.0), average_decay=0.9)
    old = random_params(Model(config.model_config(SHAPE, 7)), 3)
    save_file(dict(by_path(old)), "old.safetensors")
    sha256 = hashlib.sha256(Path("old.safetensors").read_bytes()).hexdigest()
    start = StartConfig(weights="old.safetensors", sha256=sha256, freeze=("layers/0",), rate=0.5)
    training = loaded(config=dataclasses.replace(config, start=start, members=2, vary=("initialization",)))
    training.compile(new_compiler())
    (tmp_path / "scratch").mkdir()
    outputs = Outputs(training, tmp_path / "scratch")
    training.run(Listener(), outputs.add)
    outputs.write(tmp_path / "new")
    for seed, last in ((seed, f"new/models/members/seed_{seed}") for seed in (0, 1)):
        first, final = (by_path(read_weights(Path(last, name))[1]) for name in FIRST_AND_FINAL)
        for path, values in by_path(old).items():
            is_frozen = path.startswith("layers/0")
            assert (first[path].tobytes() == values.tobytes()) == is_frozen, (seed, path)
            assert (final[path].tobytes() == values.tobytes()) == is_frozen, (seed, path)
    heads = [read_weights(Path(f"new/models/members/seed_{seed}", FIRST_AND_FINAL[0]))[1] for seed in (0, 1)]
    assert not np.array_equal(*(by_path(head)["layers/1/kernel"] for head in heads))
    table = pd.read_csv("new/results/train/start.csv")
    assert table["outcome"].tolist()[:3] == ["taken, frozen"] * 2 + ["other shape: (7,) against (3,); drawn anew"]

    alone = training.train_network(training.config.seeds_of(0), Checkpoints(None, 1e9), Listener())
    capsys.readouterr()
    run_steps, training.compiled.run_steps = training.compiled.run_steps, stopping_after_one(training)
    with pytest.raises(Stopped):
        training.train_network(training.config.seeds_of(0), Checkpoints(tmp_path / "c", 1e9), Listener())
    training.compiled.run_steps = run_steps
    again = loaded(config=dataclasses.replace(config, start=start))
    again.compiled, again.score = training.compiled, training.score
    resumed = again.train_network(again.config.seeds_of(0), Checkpoints(tmp_path / "c", 1e9), Listener())
    assert "resuming after step" in capsys.readouterr().err
    assert bits(resumed) == bits(alone)

    save_file(dict(by_path(random_params(training.model))), "old.safetensors")
    with pytest.raises(UserError, match=r"^train\.start\.sha256 must be the digest of .*old\.safetensors"):
        loaded(config=dataclasses.replace(config, start=start))
    sha256 = hashlib.sha256(Path("old.safetensors").read_bytes()).hexdigest()
    same = dataclasses.replace(start, sha256=sha256, freeze=())
    with pytest.raises(UserError, match=r"^train\.vary must name something that is random, order, got"):
        loaded(config=dataclasses.replace(config, start=same, members=2, vary=("initialization",)))


def stopping_after_one(training: Training) -> Any:
    """The steps of a training, in whose first call the process is asked to stop."""
    run_steps = training.compiled.run_steps

    def run_and_stop(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return run_steps(*arguments)

    return run_and_stop


def test_changes_that_do_not_fit_the_training_split_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_module, "devices", lambda _: jax.local_devices())  # JAX has found them already
    with pytest.raises(ConfigError, match=r"^train\.changes\.omit: no example 10 in the training split, which"):
        loaded(omit=(10,))
    monkeypatch.setattr(training_module, "LARGEST_ON_DEVICE", SPLIT.images.nbytes - 1)
    assert loaded().is_streamed
    with pytest.raises(UserError, match=r"^train\.changes must be empty for a training split of more than 0 MiB"):
        loaded(omit=(10,))


@pytest.mark.parametrize(
    ("free", "message"), [(2**10, r"^train\.batch_size 4 takes "), (2**15, r"^train takes .* GiB with this model")]
)
def test_batch_size_is_not_blamed_for_the_memory_of_the_validation(
    free: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(train_config(), Listener())
    training.validation = random_split(1000)
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    monkeypatch.setattr(memory, "_bytes_left_on_host", lambda: free)
    with pytest.raises(ConfigError, match=message):
        training.compile(new_compiler())


def test_training_without_examples_is_that_of_a_split_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of all examples, so that their order has no effect: outs are equal, and the split that others read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_module, "devices", lambda _: jax.local_devices())
    kept, label = np.array([1, 4, 6]), int(SPLIT.labels[4] + 1) % 3
    labels = np.where(kept == 4, label, SPLIT.labels[kept]).astype(np.int32)
    rest = split_of(SPLIT.images[kept], labels, SPLIT.example_id[kept])
    omitted = tuple(np.setdiff1d(SPLIT.example_id, kept).tolist())
    changed = loaded(batch_size=10, omit=omitted, relabel=((4, label),))
    for name, training in {"changed": changed, "rest": loaded(rest, batch_size=3)}.items():
        training.compile(new_compiler())
        (tmp_path / name).mkdir()
        outputs = Outputs(training, tmp_path / name)
        outputs.add(0, training.train_network(training.config.seeds_of(0), Checkpoints(None, 1e9), Listener()))
        outputs.write(tmp_path / name)
    read = {name: pd.read_csv(tmp_path / name / "results/train/epochs.csv") for name in ("changed", "rest")}
    pd.testing.assert_frame_equal(read["changed"], read["rest"], rtol=1e-4)
    tables_of = (pd.read_parquet(tmp_path / name / "results/train/dynamics.parquet") for name in ("changed", "rest"))
    pd.testing.assert_frame_equal(*tables_of, rtol=1e-4)
    assert outputs.metrics.keys() & changed.num_changed.keys() == set()
    assert changed.num_changed == {"removed_examples": 7, "relabeled_examples": 1}

    seen = as_trained(SPLIT, tmp_path / "changed/results/train")
    assert as_trained(rest, tmp_path / "rest/results/train") is rest
    for column in ("images", "labels", "true_labels", "example_id"):
        np.testing.assert_array_equal(getattr(seen, column), getattr(rest, column))
    assert set(read_dynamics(tmp_path / "changed/results/train", seen)) == {*DYNAMICS} - {"example_id"}
    trajectory = read_trajectory(tmp_path / "changed/results/train", {}, 1, None)
    assert trajectory.batch_size == 3


def test_checks_of_indices_are_refused_with_an_augmentation_that_reads_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_module, "devices", lambda _: jax.local_devices())
    runtime = load_section("runtime", RuntimeConfig, ROOT / "params.yaml")
    monkeypatch.setitem(globals(), "load_section", lambda *_: dataclasses.replace(runtime, checkify=("index",)))
    augmentation = dataclasses.replace(NO_AUGMENTATION, shift=1.0)
    with pytest.raises(UserError, match=r"^runtime\.checkify: index cannot check train\.augmentation"):
        loaded(config=train_config(augmentation=augmentation))
    loaded(config=train_config())
    for changes, message in (({"checkify": ("nan",)}, "empty"), ({"transfer_guard": "disallow"}, "allow or log")):
        with pytest.raises(ValueError, match=f"^{next(iter(changes))} must be {message} with disable_jit"):
            dataclasses.replace(runtime, disable_jit=True, **changes)


@pytest.mark.parametrize("from_host", ["", "streamed"])
def test_devices_validate_before_the_host_waits_for_the_steps(
    from_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the host copies the weights. If batches come from the host, it copies the weights first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_module, "devices", lambda _: jax.local_devices())
    monkeypatch.setattr(training_module, "LARGEST_ON_DEVICE", 0 if from_host == "streamed" else 2**20)
    events: list[str] = []

    def recorded(name: str, call: Callable[..., Any], guard: Any = contextlib.nullcontext) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            events.append(name)
            with guard():
                return call(*arguments)

        return record

    training = loaded(config=train_config())
    training.compile(new_compiler())
    assert training.functions[-1].name == ("predict" if from_host else "validate")
    guard = contextlib.nullcontext if from_host else functools.partial(jax.transfer_guard, "disallow")
    function = dataclasses.replace(training.score.function, call=recorded("score", training.score.function, guard))
    training.score = dataclasses.replace(training.score, function=dataclasses.replace(function, calls=None))
    monkeypatch.setattr(training_module, "on_host", recorded("copy", training_module.on_host))
    monkeypatch.setattr(History, "check", recorded("wait", History.check))
    history = training.train_network(training.config.seeds_of(0), Checkpoints(None, 1e9), Listener()).history
    order = ["wait", "copy", "copy", "score", "wait"] if from_host else ["score", "wait", "copy", "wait"]
    assert events == ["copy", *order * 2]

    predict = compile_predict_within(training.model, compiler=new_compiler())
    for epoch, kept in ((1, history.kept[1]), (2, history.final)):
        expected = validate(predict, kept.params, SPLIT)
        measured = {name: history.epochs[epoch - 1][f"validation_{name}"] for name in expected}
        assert measured == pytest.approx(expected, rel=1e-6)


def test_training_that_is_stopped_after_every_step_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So it does after any: what follows a resumed step depends on nothing but its checkpoint. It stops early, too."""
    config = dataclasses.replace(MUCH, patience=1)
    straight = run(config, None, Listener(None), steps_per_call=1000)
    epochs: list[int] = []
    for step in range(1, 7):
        listener = Listener(1)
        with pytest.raises(Stopped, match=f"stopped after step {step} of 9; `dvc repro` resumes from there"):
            run(config, tmp_path, listener)
        epochs += listener.epochs
        assert (f"resuming after step {step - 1}, from a checkpoint" in capsys.readouterr().err) == (step > 1)
    result = run(config, tmp_path, listener := Listener(1))
    assert listener.left == 1, "nothing was left to do"
    assert epochs == [1, 2], "each was logged once"
    assert bits(result) == bits(straight)


def test_training_stops_after_the_epoch_of_the_params_and_resumes(tmp_path: Path) -> None:
    straight, listener = run(MUCH, None, Listener(None)), Listener(None)
    with pytest.raises(Stopped, match="stopped after step 6 of 9"):
        run(MUCH, tmp_path, listener, stop_after_epoch=2)
    assert listener.epochs == [1, 2]
    assert bits(run(MUCH, tmp_path, Listener(None), stop_after_epoch=3)) == bits(straight)


def test_no_checkpoint_is_written_once_data_were_touched(tmp_path: Path) -> None:
    """A later attempt would resume from what other data may have made."""

    def refuse() -> None:
        raise UserError("data/processed/train/images.npy was written")

    with pytest.raises(UserError, match=r"images\.npy was written"):
        run(train_config(epochs=3), tmp_path, Listener(1), require_data=refuse)
    assert not [*tmp_path.rglob("step_*")]


def test_killed_private_training_spends_no_more_and_its_checkpoints_do_not_hold_its_keys(tmp_path: Path) -> None:
    straight = run(PRIVATE, None, Listener(None), secret=SECRET)
    engine, seeds = make_engine(PRIVATE, SPLIT)[0], PRIVATE.seeds_of(PRIVATE.seed)
    keys = keys_of(seeds, secret=SECRET)
    in_state = jax.tree.map(jax.random.key_data, engine.init(keys).keys)
    made = [*np.asarray(jax.random.key_data(keys))[[1, 4]], np.asarray(in_state.order), np.asarray(in_state.noise)]
    hidden = [SECRET.encode(), *(key.tobytes() for key in made)]
    for step, chunks in ((1, 1), (4, 3), (7, 3)):
        with pytest.raises(Stopped, match=f"stopped after step {step} "):
            run(PRIVATE, tmp_path, Listener(chunks), secret=SECRET)
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert written
        assert not any(key in content for key in hidden for content in written)
    result = run(PRIVATE, tmp_path, Listener(None), secret=SECRET)
    assert sum(len(part["loss"]) for part in result.history.steps) == 9, "no step was made twice"
    assert bits(result) == bits(straight)


def test_another_secret_gives_other_noise_and_the_state_does_not_show_which() -> None:
    results = [run(PRIVATE, None, Listener(None), secret=secret) for secret in (SECRET, "another", None)]
    keys = [jax.tree.leaves(state_on_host(result.state).keys) for result in results]
    assert len(keys[0]) == 4
    for each in keys[1:]:
        np.testing.assert_array_equal(each, keys[0])
    assert len({result.history.epochs[-1]["loss"] for result in results}) == 3


def test_progress_shows_epsilon_but_no_secret(capfd: pytest.CaptureFixture[str]) -> None:
    training = training_of(PRIVATE, listener := Listener(), secret=SECRET, spending=SimpleNamespace(epsilons=EPSILONS))
    training.train_network(PRIVATE.seeds_of(0), Checkpoints(None, 1e9), listener)
    said = capfd.readouterr().err
    assert all(f"epsilon {spent} (" in said for spent in ("0.5", "0.75", "1"))
    assert SECRET not in said + repr(training)


def epochs(count: int = 3) -> list[EpochMetrics]:
    return [dict.fromkeys(EPOCH_METRICS, 0.5) | {"epoch": epoch} for epoch in range(1, count + 1)]


def test_epsilon_is_a_column_and_a_panel_of_private_trainings_alone() -> None:
    public, private = tables.epoch_table(epochs()), tables.epoch_table(epochs(2), EPSILONS)
    assert "epsilon" not in public
    assert private["epsilon"].tolist() == [0.5, 0.75]
    assert len(figures.draw_learning_curves(public, "title").axes) == 2
    assert [axis.get_ylabel() for axis in figures.draw_learning_curves(private, "title").axes][2:] == ["epsilon"]


CONFIG = train_config(model=MLP(hidden=(5,), activation="relu", dropout=0.5), epochs=2, keep_epochs=(0, 1))


def train(config: TrainConfig, to: Path, checkpoints: Path | None = None, *, chunks: int | None = None) -> Path:
    """Train all members; return the folder of the outs."""
    training = training_of(config, listener := Listener(chunks, checkpoints), steps_per_call=2)
    (to / "scratch").mkdir(parents=True, exist_ok=True)
    outputs = Outputs(training, to / "scratch")
    training.run(listener, outputs.add)
    outputs.write(to)
    return to


def bytes_in(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png")
    own = (path for path in files if "members" not in path.parts)
    return {path.relative_to(folder).as_posix(): digest(path) for path in own}


def test_a_member_has_the_bytes_of_the_training_with_its_seed(tmp_path: Path) -> None:
    several = train(dataclasses.replace(CONFIG, seed=3, members=2), tmp_path / "several")
    assert read_seeds(several / "models") == [3, 4]
    found = []
    for seed in (3, 4):
        alone = train(dataclasses.replace(CONFIG, seed=seed), tmp_path / f"alone {seed}")
        for out in ("models", "results/train"):
            folder = read_folders(several / out, several / "models")[seed]
            member = {path.relative_to(folder).as_posix(): digest(path) for path in folder.rglob("*") if path.is_file()}
            assert member == bytes_in(alone / out)
            assert read_folders(alone / out, alone / "models") == {seed: alone / out}
        found.append(digest(alone / "models" / "final.safetensors"))
    assert len({*found}) == 2
    assert digest(several / "models" / "final.safetensors") == found[0]


def test_what_is_not_varied_is_that_of_the_seed() -> None:
    config = dataclasses.replace(CONFIG, seed=1, members=3, vary=("order", "dropout"))
    assert [dataclasses.astuple(config.seeds_of(seed)) for seed in config.seeds] == [
        (1, 1, 1, 1, None),
        (1, 2, 1, 2, None),
        (1, 3, 1, 3, None),
    ]


@pytest.mark.parametrize(("vary", "differ"), [("initialization", {0, 2}), ("order", {2}), ("dropout", {2})])
def test_each_purpose_has_its_own_seed(vary: Any, differ: set[int], tmp_path: Path) -> None:
    """With another seed for one purpose the initial weights stay, or the order, or else only the result differs."""
    config = dataclasses.replace(CONFIG, members=2, vary=(vary,))
    folders = read_folders(train(config, tmp_path) / "models", tmp_path / "models").values()
    initial, final = (
        {digest(folder / name) for folder in folders} for name in ("epochs/000.safetensors", "final.safetensors")
    )
    assert (len(initial) == 2) == (0 in differ)
    assert len(final) == 2


def test_one_more_member_trains_one_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(dataclasses.replace(CONFIG, members=2), tmp_path / "two", tmp_path / "checkpoints")
    capsys.readouterr()
    three = train(dataclasses.replace(CONFIG, members=3), tmp_path / "three", tmp_path / "checkpoints")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "checkpoint" in line] == [
        f"train seed {seed}: trained before, from a checkpoint" for seed in (0, 1)
    ]
    assert {line.partition(":")[0] for line in said if "epoch" in line} == {"train seed 2"}
    anew = train(dataclasses.replace(CONFIG, members=3), tmp_path / "anew")
    for out in ("models", "results"):
        assert digest(three / out) == digest(anew / out)


def test_a_training_that_is_stopped_in_any_member_ends_with_the_same_bytes(tmp_path: Path) -> None:
    config, to, checkpoints = dataclasses.replace(CONFIG, members=2), tmp_path / "stopped", tmp_path / "checkpoints"
    for number, chunks in enumerate((1, 2, 2, 3)):  # a member has four: in the first twice, then in the second
        with pytest.raises(Stopped):
            train(config, tmp_path / f"stopped {number}", checkpoints, chunks=chunks)
    train(config, to, checkpoints)
    straight = train(config, tmp_path / "straight")
    for out in ("models", "results"):
        assert digest(to / out) == digest(straight / out)


def test_the_table_of_epochs_is_the_mean_with_its_interval(tmp_path: Path) -> None:
    folder = train(dataclasses.replace(CONFIG, members=3), tmp_path) / "results" / "train"
    own = [pd.read_csv(path / "epochs.csv") for path in read_folders(folder, tmp_path / "models").values()]
    mean = pd.read_csv(folder / "epochs.csv")
    assert mean["epoch"].tolist() == [1, 2]
    losses = np.array([table["loss"] for table in own])
    np.testing.assert_allclose(mean["loss"], losses.mean(axis=0), rtol=1e-8)
    low, high = stats.t.interval(0.95, 2, losses.mean(axis=0), stats.sem(losses, axis=0))
    np.testing.assert_allclose(mean[["loss_low", "loss_high"]].to_numpy().T, [low, high], rtol=1e-7)
    assert figures.draw_learning_curves(mean, "title").axes[0].collections, "the interval is drawn"


def test_metrics_are_means_with_their_spread() -> None:
    each = [
        {"dataset": "mnist", "steps": 5, "loss": loss, "loss_low": 0.0, "loss_high": 1.0, "best_epoch": epoch}
        for loss, epoch in ((0.1, 1), (0.2, 1), (0.6, 2))
    ]
    assert over_members(each[:1]) == each[0]
    found = over_members(each)
    assert (found["members"], found["dataset"], found["steps"]) == (3, "mnist", 5)
    assert found["loss"] == pytest.approx(0.3)
    assert found["loss_sd"] == pytest.approx(np.std([0.1, 0.2, 0.6], ddof=1))
    expected = stats.t.interval(0.95, 2, 0.3, stats.sem([0.1, 0.2, 0.6]))
    assert (found["loss_low"], found["loss_high"]) == pytest.approx((0.0, expected[1]))
    assert found["best_epoch"] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("accuracy", (0.82, 0.99), (0.0, 1.0)),
        ("expected_calibration_error_uncalibrated", (0.01, 0.2), (0.0, 1.0)),
        ("label_errors_false_negative_rate", (0.01, 0.9), (0.0, 1.0)),
        ("first_grad_norm_rank_correlation_input_norm", (0.9, -0.9), (-1.0, 1.0)),
        ("validation_loss", (0.1, 0.9), (0.0, 5.58)),
        ("coherence_across_classes", (0.1, 0.9), (-4.58, 5.58)),
    ],
)
def test_the_interval_of_a_mean_ends_at_possible_values(
    name: str, values: tuple[float, float], ends: tuple[float, float]
) -> None:
    found = spread(name, values)
    assert (found.low, found.high) == pytest.approx(ends, abs=0.01)


def test_more_members_than_the_disk_holds_are_refused_with_how_many_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(CONFIG, Listener())
    size = num_parameters(training.model.abstract_params())
    each = (4 + 10) * 4 * size + 32 * 10  # four files of weights, ten copies in a checkpoint, ten examples
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 * each))
    for members, fits in ((1, True), (5, True), (6, False)):
        training.config = dataclasses.replace(CONFIG, members=members)
        message = rf"^train\.members: {members} members take .* GB of disk space are free; at most 5 fit$"
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match=message):
            Outputs(training, tmp_path)
