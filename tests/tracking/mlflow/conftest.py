"""A store for the tests of this folder, which takes seconds to create."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

OPEN = (
    "from gradtrail.tracking.mlflow.client import experiment_id, open_store; "
    "print(experiment_id(open_store(), 'models'))"
)


@dataclass(frozen=True)
class CreatedStore:
    """A store in a folder, and the status and output of each of the processes that created it at once."""

    folder: Path
    processes: list[tuple[int, bytes]]


@pytest.fixture(scope="session")
def created_store(tmp_path_factory: pytest.TempPathFactory) -> CreatedStore:
    folder = tmp_path_factory.mktemp("store")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING")}
    env |= {"DVC_ROOT": str(folder)}
    started = [subprocess.Popen([sys.executable, "-c", OPEN], env=env, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate()[0] for process in started]
    return CreatedStore(folder, [(process.returncode, out) for process, out in zip(started, outputs, strict=True)])
