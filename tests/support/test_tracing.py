"""A trace holds the calls after the first of each function, for half a second at least, however the work ends."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gradtrail.support import tracing
from gradtrail.support.tracing import recording


def repeat(count: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, value: jnp.tanh(value @ value), start)


MATRIX = jnp.full((64, 64), 0.01)
COUNT = jnp.int32(3)
WORK: Callable[..., Any] = jax.jit(repeat).lower(COUNT, MATRIX).compile()


@pytest.fixture(autouse=True, scope="module")
def _profiler_is_stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Between two tests the second one shows it: a profiler does not start where another one runs."""
    yield
    jax.profiler.start_trace(tmp_path_factory.mktemp("after"))
    jax.profiler.stop_trace()


def recorded_names(folder: Path) -> list[str]:
    """Return the names of the calls that Perfetto shows."""
    (path,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("my ")]


def test_recording_begins_with_the_first_second_call_and_lasts_to_the_end_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "RECORDED_SECONDS", 60)
    with recording(tmp_path) as wrapper:
        for name in ("my first", "my second", "my first", "my third", "my second"):
            wrapper(name, WORK)(COUNT, MATRIX).block_until_ready()
    assert recorded_names(tmp_path) == ["my first", "my third", "my second"]
    (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")  # what TensorBoard's plugin shows
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    host = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert {"my first", "my second", "my third"} <= host
    assert any("dot" in name or "tanh" in name or "fusion" in name for name in host), "XLA's operations"


def test_recording_ends_after_its_time_and_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "RECORDED_SECONDS", 0)
    with recording(tmp_path) as wrapper:
        for name in ("my first", "my second", "my first", "my second", "my second"):
            wrapper(name, WORK)(COUNT, MATRIX)
        assert recorded_names(tmp_path) == ["my first"]
    assert recorded_names(tmp_path) == ["my first"]


def test_functions_that_are_called_once_are_not_recorded(tmp_path: Path) -> None:
    with recording(tmp_path) as wrapper:
        wrapper("my work", WORK)(COUNT, MATRIX)
    assert not any(tmp_path.iterdir())


def test_an_exception_stops_it(tmp_path: Path) -> None:
    outcomes = iter([None, KeyboardInterrupt])

    def work() -> None:
        if outcome := next(outcomes):
            raise outcome

    with pytest.raises(KeyboardInterrupt), recording(tmp_path) as wrapper:  # noqa: PT012
        wrapper("my work", work)()
        wrapper("my work", work)()
    assert recorded_names(tmp_path) == ["my work"]
