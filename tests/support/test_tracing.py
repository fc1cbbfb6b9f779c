"""What a trace holds: the calls after the first of each function, no more than so many seconds, whatever happens."""

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from factories import cases

from gradtrail.support import tracing
from gradtrail.support.tracing import Recorder


def repeat(count: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, value: jnp.tanh(value @ value), start)


MATRIX = jnp.full((64, 64), 0.01)
WORK: Callable[..., Any] = jax.jit(repeat).lower(jnp.int32(1), MATRIX).compile()


@pytest.fixture(autouse=True, scope="module")
def _profiler_is_stopped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Between two tests the second one shows it: a profiler does not start where another one runs."""
    yield
    jax.profiler.start_trace(tmp_path_factory.mktemp("after"))
    jax.profiler.stop_trace()


def events(trace: Path | None) -> list[dict[str, Any]]:
    """Return what Perfetto shows."""
    assert trace
    (path,) = trace.glob("plugins/profile/*/perfetto_trace.json.gz")
    content: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return content


def names(trace: Path | None) -> list[str]:
    return [event["name"] for event in events(trace) if event.get("name", "").startswith("my ")]


def planes(trace: Path | None) -> Any:
    """Return what TensorBoard's plugin shows, as JAX reads it."""
    assert trace
    (path,) = trace.glob("plugins/profile/*/*.xplane.pb")
    return jax.profiler.ProfileData.from_file(str(path)).planes


def test_recording_begins_with_the_first_second_call(tmp_path: Path) -> None:
    with Recorder(tmp_path, seconds=60) as recorder:
        for name in ("my first", "my second", "my first", "my third", "my second"):
            recorder.recording(name, WORK)(jnp.int32(3), MATRIX).block_until_ready()
    assert names(recorder.trace) == ["my first", "my third", "my second"]
    assert len(list(tmp_path.iterdir())) == 2, "one was kept, and one is of before"
    host = {event.name for plane in planes(recorder.trace) for line in plane.lines for event in line.events}
    assert {"my first", "my second", "my third"} <= host
    assert any("dot" in name or "tanh" in name or "fusion" in name for name in host), "XLA's operations"


@pytest.mark.slow
def test_a_call_that_never_ends_is_recorded_for_so_many_seconds(tmp_path: Path) -> None:
    ended = threading.Event()

    def call() -> None:
        assert ended.wait(120), "the profiler goes on"

    with Recorder(tmp_path, seconds=1.0) as recorder:
        again = recorder.recording("my long one", call)
        recorder.recording("my warm-up", WORK)(jnp.int32(3), MATRIX)
        watch = threading.Thread(target=lambda: (_until(lambda: any(tmp_path.rglob("perfetto*"))), ended.set()))
        watch.start()
        again()
        watch.join()
        recorder.recording("my other", WORK)(jnp.int32(3), MATRIX)
        assert len(list(tmp_path.iterdir())) == 1, "nothing is recorded any more"
    assert names(recorder.trace) == ["my warm-up"]


@pytest.mark.slow
def test_a_trace_that_is_too_large_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_num_bytes", lambda folder: {"1": 10, "2": 100}[folder.name])
    with Recorder(tmp_path, seconds=60, largest_bytes=50) as recorder:
        work = recorder.recording("my work", WORK)
        work(jnp.int32(1), MATRIX)
        work(jnp.int32(10), MATRIX).block_until_ready()
    assert recorder.trace
    assert recorder.trace.name == "1", "the second one was too large"
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("fault", cases([FloatingPointError, KeyboardInterrupt], fast=[KeyboardInterrupt]))
def test_an_exception_stops_it(fault: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        raise fault

    with Recorder(tmp_path) as recorder, pytest.raises(fault):
        recorder.recording("my work", fail)()
    assert names(recorder.trace) == ["my work"]


def test_fault_of_the_profiler_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Recorder(tmp_path) as recorder:
        patch.setattr(jax.profiler, "start_trace", lambda *_, **__: (_ for _ in ()).throw(OSError("no room")))
        assert recorder.recording("my work", WORK)(jnp.int32(1), MATRIX).shape == (64, 64)
        recorder.recording("my work", WORK)(jnp.int32(1), MATRIX)
    with pytest.raises(OSError, match="no room"):
        _ = recorder.trace


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
