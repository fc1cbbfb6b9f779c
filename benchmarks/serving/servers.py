"""The servers that the benchmark compares: how each is made, started, asked and ended."""

import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from gradtrail.support.git import with_interpreter

if TYPE_CHECKING:
    from gradtrail.stages.export import Network

OURS = "gradtrail"
PACKAGES = {"onnx": ("onnx==1.23.2", "onnxruntime==1.32.0"), "torch": ("torch==2.13.0",)}
ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 120  # seconds for a server to be ready


@dataclass(kw_only=True)
class Server:
    """A server that can be started."""

    name: str  # in the tables
    command: Sequence[str]  # without the port, which follows
    env: dict[str, str]  # in addition to this process's
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self, *, is_cold: bool = False) -> Iterator[float]:
        """Start it; yield the seconds until it was ready; end it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        env = with_interpreter() | self.env | ({"JAX_ENABLE_COMPILATION_CACHE": "false"} if is_cold else {})
        command = [*self.command, "--port", str(self.port)]
        with tempfile.TemporaryFile() as log:
            started = time.perf_counter()
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                while not self._is_ready():
                    if self.process.poll() is not None or time.perf_counter() - started > _PATIENCE:
                        log.seek(0)
                        raise SystemExit(f"{self.name} did not start:\n{log.read().decode()[-3000:]}")
                    time.sleep(0.005)
                yield time.perf_counter() - started
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGTERM)
                self.process.wait()

    def _is_ready(self) -> bool:
        try:
            return self.ask("GET", "/ping")[0] == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def probabilities(self, body: bytes) -> np.ndarray:
        """Return the answer to a request."""
        status, answer = self.ask("POST", "/invocations", body)
        if status != 200:
            raise SystemExit(f"{self.name} answered {status}: {answer[:500]!r}")
        return np.asarray(json.loads(answer)["predictions"]["probabilities"])

    def _processes(self) -> list[psutil.Process]:
        assert self.process
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Return the processor time that its processes have taken so far."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)

    def memory(self) -> dict[str, float]:
        """Return the MiB of its processes: `rss_mib`, resident, and `pss_mib`, proportional; on macOS, unique."""
        found = [process.memory_full_info() for process in self._processes()]
        return {f"{name}_mib": sum(getattr(each, name, each.uss) for each in found) / 2**20 for name in ("rss", "pss")}


def random_network(kind: str) -> "Network":
    """Return a network with the layers of `params.yaml`, in float32, and random weights."""
    import jax

    from gradtrail.core.nn.models import Model
    from gradtrail.core.train.config import TrainConfig
    from gradtrail.stages.common.params import validate
    from gradtrail.stages.common.yaml_file import read_yaml
    from gradtrail.stages.export import Network

    section = read_yaml(ROOT / "params.yaml")["train"] | {"model": kind}
    train = validate(section, TrainConfig, "train")
    config = dataclasses.replace(train.model_config((28, 28), 10), precision="float32")
    model, rng = Model(config), np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        deviation = 0.1 if leaf.ndim == 1 else np.sqrt(2 / np.prod(leaf.shape[:-1]))
        return rng.normal(scale=deviation, size=leaf.shape).astype(leaf.dtype)

    return Network(
        model=model,
        members={0: jax.tree.map(draw, model.abstract_params())},
        weights="final",
        epochs=(1,),
        dataset="mnist 00000000",
        classes=tuple(map(str, range(10))),
        temperature=1.5,
        validation_images=5_000,
    )


def write_models(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write an export of a random network, and the model that MLflow logs of it."""
    from gradtrail.core.export import ExportConfig
    from gradtrail.stages.export import write_export
    from gradtrail.tracking.models import save

    export, logged = folder / f"{kind}-export", folder / f"{kind}-mlflow"
    write_export(export, random_network(kind), ExportConfig(name="digits", batch_sizes=(1, 8, 32, 128), precisions=()))
    save(logged, export, {})
    return export, logged


def environment_of(peer: str, folder: Path) -> Path:
    """Return the interpreter of a peer's environment, which is made where it is missing.

    It has the peer's packages, and behind them those of the environment that runs this, for the application.
    """
    home = folder / "-".join(PACKAGES[peer]).replace("==", "-")
    python, done = home / "bin" / "python", home / "complete"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        numpy_too = (*PACKAGES[peer], f"numpy=={np.__version__}")
        subprocess.run([sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, str(home)], check=True)
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(python), *numpy_too]
        if subprocess.run(install, check=False).returncode:  # pip also finds what only its own settings name
            subprocess.run(
                [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", *numpy_too], check=True
            )
        (site,) = home.glob("lib/python*/site-packages")
        here = Path(np.__file__).parents[1]
        (site / "behind.pth").write_text(f"{here}\n")
        done.touch()
    return python


def servers_of(export: Path, logged: Path, environments: Mapping[str, Path]) -> dict[str, Server]:
    """Return the servers of one network."""
    ours = {"PYTHONPATH": str(ROOT / "src")}
    peers = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    mlflow = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(logged), "--env-manager", "local"]
    found = {
        OURS: Server(name=OURS, command=[sys.executable, "-m", "gradtrail", "serve", "--model", str(export)], env=ours),
        "mlflow": Server(
            name="mlflow",
            command=mlflow,
            env={"PYTHONPATH": "", "MLFLOW_DISABLE_TELEMETRY": "true"},
        ),
    }
    for name, python in environments.items():
        command = [str(python), "-m", "benchmarks.serving.peers", name, str(export)]
        found[name] = Server(name=name, command=command, env=peers)
    return found
