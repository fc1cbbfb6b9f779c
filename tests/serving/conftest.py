"""A store per test, and exports, which take a second each."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from exports import write_small_export
from in_memory_server import SIZES
from mlflow import MlflowClient
from model_store import enter_store
from projects import empty_store


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """The client of a new store, in whose folder the test runs."""
    return enter_store(empty_store(), tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Small exports, by the seed of their weights."""
    folder, made = tmp_path_factory.mktemp("exports"), dict[int, Path]()

    def export(seed: int) -> Path:
        if seed not in made:
            made[seed] = write_small_export(folder / str(seed), seed=seed, batch_sizes=(1, 32))
        return made[seed]

    return export


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small export for the batch sizes of a server."""
    return write_small_export(tmp_path_factory.mktemp("served") / "export", batch_sizes=SIZES)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True
