"""A batch that does not fit is refused in one line that says what would."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradtrail.core.config import ConfigError
from gradtrail.core.xla.compiler import NO_COST, NO_TIMES, CompiledFunction
from gradtrail.support import memory

GIB = 2**30


def function(*, fixed: int, temporary: int) -> CompiledFunction:
    cost = dataclasses.replace(NO_COST, temporary_bytes=temporary, total_bytes=fixed + temporary)
    return CompiledFunction(name="step", call=print, cost=cost, times=NO_TIMES)


@pytest.mark.parametrize(
    ("fixed", "temporary", "message"),
    [
        (0, 16 * GIB, "^train.batch_size 6000 takes 16.0 GiB in step; 8.0 GiB are free; 3,000 would fit$"),
        (4 * GIB, 12 * GIB, "; 2,000 would fit$"),
        (9 * GIB, GIB, "; not even one example would fit: a smaller model may$"),
        (4 * GIB, 4 * GIB, None),
    ],
)
def test_too_large_batch_names_one_that_fits(
    fixed: int, temporary: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * GIB)
    functions = [function(fixed=0, temporary=1), function(fixed=fixed, temporary=temporary)]
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        memory.require_memory("train.batch_size", 6000, functions, fixed_bytes=fixed)


@pytest.mark.parametrize(
    ("on_device", "host_bytes", "refused"),
    [(None, 6 * GIB, "10.0 GiB"), (None, 4 * GIB, None), (2 * GIB, 0, "4.0 GiB"), (5 * GIB, 9 * GIB, "9.0 GiB")],
)
def test_a_model_is_refused_whose_functions_and_arrays_on_the_host_do_not_fit(
    on_device: int | None, host_bytes: int, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 GiB for a function, 8 on the host; a device without memory of its own uses the host's."""
    monkeypatch.setattr(memory, "_bytes_left_on_device", lambda: on_device)
    monkeypatch.setattr(memory, "_bytes_left_on_host", lambda: 8 * GIB)
    monkeypatch.setattr(memory.jax, "local_device_count", lambda: 1)
    refusal = pytest.raises(ConfigError, match=f"^gradients takes {refused} with this model; .* GiB are free")
    with refusal if refused else contextlib.nullcontext():
        functions = [function(fixed=0, temporary=4 * GIB)]
        memory.require_memory_for_model("gradients", functions, host_bytes=host_bytes)


@pytest.mark.parametrize(("limit", "available"), [("max", 8 * GIB), (f"{2 * GIB}", 3 * GIB // 2)])
def test_lower_limit_of_a_container_counts(
    limit: str, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=GIB // 2))
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    assert memory.available_bytes() == available
