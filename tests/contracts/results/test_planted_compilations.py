"""The stage reports what a call compiles in a training, and a donation that is lost.

Five are planted: a jitted lambda each epoch, `static_argnums` on the epoch, a shape that grows with the epoch, an eager
operation in each chunk, and a train step that donates nothing.
"""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from factories import NUM_CLASSES, SHAPE, random_split, train_config
from projects import finished_project

from gradtrail.core.nn import inference
from gradtrail.core.nn.models import Model
from gradtrail.core.train.history import History
from gradtrail.core.train.loop import Chunk, compile_engine, make_program
from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.train import loop as training_runs
from gradtrail.stages.train.checkpointing import ResumeFolder
from gradtrail.tracking.mlflow.compile_report import compiling

CONFIG = train_config(model="linear", keep_epochs=(0,))  # two epochs, in batches of 4
SPLIT = random_split(10)
SIZES = itertools.count(101)  # of arrays that no other test compiles for
TOLD = {  # plant → what is told of it, and how many compilations of calls it causes in two epochs
    "lambda": (r"<lambda> was compiled 2 times by a call at {here}; float32\[3\]", 2),
    "static": (r"by_epoch was compiled 2 times by a call at {here}; float32\[3\]", 2),
    "growing": (r"grown was compiled 2 times by a call at {here}; argument 1: float32\[1\], float32\[2\]", 2),
    "eager": (r"add was compiled once by a call at {here}; float32\[\d+\], int32\[\], weak_type=True", 1),
    "donation": (r"train_step, compiled at {here}, does not reuse the memory of 18 arguments: int32\[\], .+", 0),
}


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant all five, in what the training loop calls after each epoch, after each chunk, and to compile."""
    compile_it, eager = Compiler.compile, jax.device_put(np.ones(next(SIZES), np.float32))

    def by_epoch(values: jax.Array, epoch: int) -> jax.Array:
        return values * epoch

    def grown(values: jax.Array) -> jax.Array:
        return values * 2

    static, growing = jax.jit(by_epoch, static_argnums=1), jax.jit(grown)

    def after_epoch(chunk: Chunk) -> None:
        jax.jit(lambda values: values * 2)(np.ones(3, np.float32))
        static(np.ones(3, np.float32), chunk.epoch)
        growing(np.ones(chunk.epoch, np.float32))

    def without(self: Compiler, *args: Any, donate_argnums: object = (), **options: Any) -> object:
        return compile_it(self, *args, **options)

    def first(action: Callable[[Chunk], object], method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, chunk, *args: (action(chunk), method(self, chunk, *args))[1]

    monkeypatch.setattr(History, "add", first(after_epoch, History.add))
    monkeypatch.setattr(History, "check", first(lambda _: eager + 1, History.check))
    monkeypatch.setattr(Compiler, "compile", without)


def work() -> None:
    """Train as the stage does, without a run in MLflow."""
    silent = SimpleNamespace(after_chunk=lambda *_: None, after_epoch=lambda *_: None, diverged=None)
    stage = SimpleNamespace(name="train", runtime=SimpleNamespace(compile_cache=False, trace=False))
    with compiling(SimpleNamespace(stage=stage, is_open=False)) as compiler:
        model = Model(CONFIG.model_config(SHAPE, NUM_CLASSES))
        engine = compile_engine(make_program(CONFIG, model, len(SPLIT), jax.devices()), compiler=compiler)
        predict = inference.compile_predict(model, inference.VALIDATION_BATCH_SIZE, compiler=compiler)
        validate = functools.partial(inference.validate, predict, images=SPLIT.images, labels=SPLIT.labels)
        checkpoints = ResumeFolder(None, 1.0, lambda: 0.0)
        member = training_runs.Member(seeds=CONFIG.seeds_of(CONFIG.seed), checkpoints=checkpoints)
        training_runs.run(engine, validate, SPLIT, CONFIG, member=member, listener=silent, steps_per_call=2)


def besides_epochs(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("train: epoch ")]


def assert_told(stderr: str, location: str) -> None:
    """Each plant has one line, and there is no other."""
    expected = [f"train: warning: {words.format(here=location)}" for words, _ in TOLD.values()]
    lines = besides_epochs(stderr)
    assert len(lines) == len(expected), stderr
    assert all(any(re.fullmatch(words, line) for line in lines) for words in expected), stderr


def test_training_compiles_nothing_by_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert besides_epochs(capsys.readouterr().err) == []


def test_stage_warns_of_all_five(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch)
    work()
    assert_told(capsys.readouterr().err, r"\S*test_planted_compilations\.py:\d+")


_EACH_EPOCH = """
        jax.jit(lambda values: values * 2)(np.ones(3, np.float32))
        jax.jit(by_epoch, static_argnums=1)(np.ones(3, np.float32), epoch)
        grown(np.ones(epoch + 1, np.float32))
"""
_FUNCTIONS = """

def by_epoch(values, epoch):
    return values * epoch


@jax.jit
def grown(values):
    return values * 2
"""


@pytest.mark.slow
def test_project_warns_of_all_five_with_cold_and_warm_cache(tmp_path: Path) -> None:
    """Planted in the code of the training loop; the second execution finds all programs in the persistent cache."""
    project = finished_project().copy(tmp_path / "project")
    (project.folder / "benchmarks").mkdir()
    project.gradtrail("gate", "--accept")
    path = project.folder / "src/gradtrail/core/train/loop.py"
    source = path.read_text()
    for original, planted in {
        "if records is None else records\n": "if records is None else records" + _EACH_EPOCH,
        "    done = epoch * engine": "    state.step + 1\n                done = epoch * engine",
        "        donate_argnums=(0, 1),\n": "",
    }.items():
        assert source.count(original) == 1
        source = source.replace(original, planted)
    path.write_text(source + _FUNCTIONS)
    location = r"by a call at src/gradtrail/core/train/loop\.py:\d+"
    expected = [
        rf"<lambda> was compiled 3 times {location}; float32\[3\]",
        rf"by_epoch was compiled 3 times {location}; float32\[3\]",
        rf"grown was compiled 3 times {location}; argument 1: float32\[1\], float32\[2\], float32\[3\]",
        rf"add was compiled once {location}; int32\[\], int32\[\], weak_type=True",
        r"train_step, compiled at src/gradtrail/core/train/loop\.py:\d+, does not reuse the memory of \d+ arguments.+",
    ]
    for _ in range(2):
        warnings = [line for line in project.run_stage("train").splitlines() if "warning" in line]
        assert len(warnings) == len(expected), warnings
        for words, line in zip(expected, warnings, strict=True):
            assert re.fullmatch(f"train: warning: {words}", line), warnings
    with pytest.raises(AssertionError, match="ended with 1") as failure:
        project.gradtrail("gate")
    for words in expected:
        assert re.search(words.replace("3 times", "2 times").replace(r", float32\[3\]", ""), str(failure.value))
