"""What a stage compiled is logged to its run: metrics, a table and programs; what a call compiled is a warning."""

import contextlib
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.compilation_cache import compress_executable, decompress_executable
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from gradtrail.core.profile.benchmark import MachineRates
from gradtrail.support.progress import progress_bar
from gradtrail.tracking import compile_report
from gradtrail.tracking.compile_report import compiling

RATES = MachineRates(flops_per_second=1e9, bytes_per_second=1e8)


class RecordingRun:
    """A run that keeps what is logged to it."""

    def __init__(self, *, is_open: bool = True):
        self.stage = SimpleNamespace(
            name="train", runtime=SimpleNamespace(compile_cache=False, trace=False, checkify=())
        )
        self.is_open = is_open
        self.logged: dict[str, float] = {}
        self.written: dict[str, str] = {}
        self.logged_timings: dict[str, Any] = {}

    def best_effort(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def metrics(self, values: dict[str, float]) -> None:
        self.logged |= values

    def timings(self, **values: Any) -> None:
        self.logged_timings |= values

    def files(self, folder: Path, under: str) -> None:
        self.written |= {f"{under}/{path.name}": path.read_text(errors="replace") for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_report, "measure_rates", lambda _: RATES)


def work(run: RecordingRun, shapes: tuple[int, ...] = (), at_end: Callable[[], object] = lambda: None) -> None:
    @jax.jit
    def planted(values: jax.Array) -> jax.Array:
        return values.sum()

    with compiling(run) as compiler:
        square = compiler.compile("square", lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), jnp.float32))
        for _ in range(3):
            square(np.eye(8, dtype=np.float32))
        for length in shapes:
            planted(np.ones(length, np.float32))
        at_end()


def test_a_run_gets_times_costs_memory_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordingRun()
    work(run)
    assert set(run.logged) == {f"compile/{name}" for name in ("total_seconds", "cache_hit_rate", "unplanned")}
    assert run.logged["compile/unplanned"] == 0
    assert run.logged_timings["machine"] == vars(RATES)
    assert run.logged_timings["compile_seconds"] > 0
    (square,) = run.logged_timings["functions"]
    assert (square["function"], square["signature"]) == ("square", "float32[8,8]")
    assert square["flops"] >= 2 * 8**3 - 8**2
    times = [square[f"{key}_seconds"] for key in ("trace", "lower", "compile", "first_call", "steady_call")]
    assert np.isfinite(times).all()
    programs = (f"square.{kind}.txt" for kind in ("jaxpr", "stablehlo", "hlo"))
    assert set(run.written) == {f"compile/{name}" for name in ("functions.json", "recompilations.json", *programs)}
    assert json.loads(run.written["compile/recompilations.json"])["data"] == []
    assert capsys.readouterr().err == ""


def test_compilation_by_a_call_is_a_warning_at_once_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordingRun()
    with progress_bar("train", 8580, unit="steps") as bar:
        bar.update(4290)
        work(run, shapes=(3, 4, 3), at_end=lambda: print("then", file=sys.stderr))
    assert run.logged["compile/unplanned"] == 2
    first, again, then = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"train: warning: planted was compiled by a call at \S+:\d+ \(train at 4,290 of 8,580\)", first)
    assert re.fullmatch(
        r"train: warning: planted was compiled again by a call at \S+:\d+: argument 1 \(`values`\) has shape \(4,\), "
        r"was \(3,\) \(train at 4,290 of 8,580\)",
        again,
    )
    assert then == "then"
    table = json.loads(run.written["compile/recompilations.json"])
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    reasons = ["", "argument 1 (`values`) has shape (4,), was (3,)"]
    assert [(row["function"], row["reason"], row["compilations"]) for row in rows] == [
        ("planted", reason, 1) for reason in reasons
    ]


def test_warnings_are_counted_when_there_are_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    work(RecordingRun(), shapes=tuple(range(1, 31)))
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert last == "train: warning: calls compiled 30 programs: see compile/recompilations.json of the run"


def test_failed_or_untracked_stage_reports_compilations_by_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), compiling(RecordingRun()):
        _ = jax.jit(lambda values: values + 1)(np.ones(3, np.float32)), 1 / 0
    assert "<lambda> was compiled by a call" in capsys.readouterr().err
    untracked = RecordingRun(is_open=False)
    work(untracked, shapes=(3, 4))
    assert (untracked.logged, untracked.written) == ({}, {})
    assert "planted was compiled again" in capsys.readouterr().err


def test_every_compilation_counts_in_the_total_and_each_function_has_a_row() -> None:
    run = RecordingRun()
    with compiling(run) as compiler:
        shapes = [jax.ShapeDtypeStruct((length,), jnp.float32) for length in (3, 4)]
        for shape in shapes:
            compiler.compile("sine", jnp.sin, shape)
        compiler.for_variant("bfloat16").compile("sine", jnp.sin, shapes[0])
    total = sum(compiled.times.total_seconds for compiled in compiler.compiled)
    assert run.logged["compile/total_seconds"] == total > compiler.functions["sine"].times.total_seconds
    (sine,) = run.logged_timings["functions"]
    assert (sine["function"], sine["signature"]) == ("sine", "float32[4]")
    assert json.loads(run.written["compile/recompilations.json"])["data"] == [], "planned"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty project; JAX's compilation cache is the one of the tests again at the end."""
    (tmp_path / "dvc.yaml").touch()
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def other_architecture(entry: bytes) -> bytes:
    """The entry with the target of another architecture, whose name has the same length."""
    here = platform.machine().encode()
    other = b"mips64el"[: len(here)]
    return compress_executable(decompress_executable(entry).replace(here + b"-", other + b"-"))


def compile_programs(run: RecordingRun, count: int) -> dict[str, float]:
    """Compile as a stage with the cache does; return its look-ups, and the number of programs that came from it."""
    run.stage.runtime.compile_cache = True
    with compiling(run) as compiler:
        for size in range(1, count + 1):
            compiler.compile(f"sine {size}", lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((size, size), jnp.float32))
    timings = run.logged_timings
    num_cached = sum(row["cached"] for row in timings["functions"])
    return {name: timings["cache"][name] for name in ("requests", "hits", "rejected")} | {"cached": num_cached}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_architecture, "INTERNAL: Target arch mismatch"),
        (lambda entry: compress_executable(decompress_executable(entry)[:100]), "JaxRuntimeError"),
        (lambda entry: entry[:100] + bytes(50) + entry[150:], "decompress"),
        (lambda _: b"", "decompress"),
    ],
    ids=["other architecture", "no executable", "corrupt bytes", "empty"],
)
def test_entry_that_is_rejected_on_load_is_a_miss_and_one_warning(
    damage: Callable[[bytes], bytes], reason: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_programs(RecordingRun(), 3)
    assert capsys.readouterr().err == ""
    entries = sorted(project.rglob("*-cache"))
    for entry in entries[:2]:
        entry.write_bytes(damage(entry.read_bytes()))

    for _ in range(2):  # JAX does not replace the entries
        run = RecordingRun()
        numbers = compile_programs(run, 3)
        assert numbers == {"requests": 3, "hits": 1, "rejected": 2, "cached": 1}
        assert run.logged["compile/cache_hit_rate"] == pytest.approx(1 / 3)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("train: warning: compilation cache: programs rejected on load and compiled again: 2 (")
        assert reason in line
        assert line.endswith(f"delete {entries[0].parent}")


def test_programs_that_cannot_be_written_are_one_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LRUCache, "put", full_disk)
    assert compile_programs(RecordingRun(), 2)["rejected"] == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"train: warning: compilation cache: programs not written to .*: 2 \(OSError: .* No space", line)
    assert not [*project.rglob("*-cache")]
