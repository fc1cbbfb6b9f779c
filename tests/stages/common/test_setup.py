"""Two processes do not compile the same function, and a stage ends with its metrics and its time."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from factories import ROOT
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from gradtrail.core.xla.compiler import Compiler
from gradtrail.stages.common import setup
from gradtrail.stages.common.stage import Stage, run_stage


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The persistent compilation cache of a project of its own."""
    (tmp_path / "dvc.yaml").touch()
    monkeypatch.chdir(tmp_path)
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    reset_cache()
    yield setup.set_up_cache()
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def is_cached(compiler: Compiler) -> bool:
    """Compile a function that no one compiled under this project; return whether it came from the cache."""
    argument = jax.ShapeDtypeStruct((7,), jnp.float32)
    return compiler.compile("doubled", lambda values: jnp.sin(values) * 2, argument).times.cached


def test_compiled_function_comes_from_cache(cache: Path) -> None:
    guard = setup.only_compiler(cache)
    assert [is_cached(Compiler(time.perf_counter, guard)) for _ in range(2)] == [False, True]


def test_cache_of_another_kind_of_processor_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_cached(Compiler(time.perf_counter))
    monkeypatch.setattr(setup, "processor_digest", lambda: "0123456789ab")
    reset_cache()
    assert setup.set_up_cache().parent == cache.parent
    assert not is_cached(Compiler(time.perf_counter))


def test_program_is_compiled_by_one_at_a_time(tmp_path: Path) -> None:
    def compile_it() -> None:
        with setup.only_compiler(tmp_path)("ab12"):
            pass

    second = threading.Thread(target=compile_it)
    with setup.only_compiler(tmp_path)("ab34"), setup.only_compiler(tmp_path)("cd12"):
        second.start()
        second.join(timeout=0.1)
        assert second.is_alive()
    second.join()


def test_stage_ends_with_its_metrics_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pipeline", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)

    def main(stage: Stage) -> None:
        (stage.folder / "results" / "metrics").mkdir(parents=True)
        metrics = {"dataset": "digits", "num_examples": 12_345, "test_loss": 0.123456}
        (stage.folder / "results" / "metrics" / "fetch.json").write_text(json.dumps(metrics))

    run_stage(main, "fetch", shows=("num_examples", "test_loss"))
    run_stage(lambda _: None, "fetch")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"fetch: examples 12,345, test loss 0\.1235, [\d.]+ s", first)
    assert re.fullmatch(r"fetch: [\d.]+ s", second)
