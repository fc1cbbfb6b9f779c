"""What MLflow gets of a training while it runs: the trace, of a real training, and a profiler that always stops."""

import contextlib
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from factories import make_engine, random_split, seed_keys, train_config

from gradtrail.core.train import loop
from gradtrail.tracking.mlflow.training_log import TrainingLog

CONFIG, SPLIT = train_config(epochs=1), random_split(10)  # three steps


class Run:
    """Keeps the files that are logged."""

    best_effort = staticmethod(contextlib.nullcontext)

    def __init__(self) -> None:
        self.logged: dict[str, bytes] = {}

    def files(self, path: Path, under: str) -> None:
        files = (file for file in path.rglob("*") if file.is_file())
        self.logged |= {f"{under}/{file.relative_to(path).as_posix()}": file.read_bytes() for file in files}


def train(run: Run, steps_per_call: int, *, trace: bool = True, fails_after: int | None = None) -> None:
    """Train with a log; every chunk is marked by its number in the trace."""
    engine, examples = make_engine(CONFIG, SPLIT)
    runtime: Any = SimpleNamespace(trace=trace, steps_per_call=steps_per_call)
    chunks = loop.train(engine, engine.init(seed_keys(0)), examples, steps_per_call=steps_per_call)
    with TrainingLog(run, engine, runtime, is_live=True) as log:  # type: ignore[arg-type]
        for number in range(1, 5):
            with jax.profiler.TraceAnnotation(f"chunk {number}"):
                if (chunk := next(chunks, None)) is None:
                    break
                jax.block_until_ready(chunk.state)
            if number == fails_after:
                raise FloatingPointError("diverged")
            log.after_chunk(chunk.state)


def recorded(run: Run) -> set[str]:
    (trace,) = (data for name, data in run.logged.items() if name.endswith("perfetto_trace.json.gz"))
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return {name for event in events if (name := event.get("name", "")).startswith("chunk ")}


@pytest.fixture(autouse=True)
def _profiler_is_stopped(tmp_path: Path) -> Any:
    yield
    jax.profiler.start_trace(tmp_path)  # which fails where another one runs
    jax.profiler.stop_trace()


@pytest.mark.parametrize(("steps_per_call", "chunk"), [(1, 2), (2, 2), (3, 1), (100, 1)])
def test_the_second_chunk_is_recorded_or_the_only_one(steps_per_call: int, chunk: int) -> None:
    train(run := Run(), steps_per_call)
    assert recorded(run) == {f"chunk {chunk}"}
    assert any(name.startswith("trace/plugins/profile/") and name.endswith(".xplane.pb") for name in run.logged)


@pytest.mark.parametrize(("steps_per_call", "fails_after"), [(1, 1), (1, 2), (3, 1)])
def test_where_the_training_fails_the_profiler_is_stopped(steps_per_call: int, fails_after: int) -> None:
    run = Run()
    with pytest.raises(FloatingPointError, match="diverged"):
        train(run, steps_per_call, fails_after=fails_after)
    assert run.logged == {}


def test_no_trace_is_recorded_unless_asked_for() -> None:
    train(run := Run(), 1, trace=False)
    assert run.logged == {}
