"""`gradtrail serve` beside `mlflow models serve`, and beside ONNX Runtime and PyTorch behind the same application.

    python -m benchmarks.serving [--models mlp,cnn] [--environments .gradtrail/benchmarks]

Each serves the same network of random weights: an export, the model that MLflow logs of it, and the peers with its
tensors. First each is started twice: cold, without a compile cache, and warm; then all of them run, and are loaded in
turn by 1, 8 and 32 clients, in rounds, with one image a request, the same body to `/invocations` for all. Answers must
agree to 1e-5 before anything is timed.

The peers' environments are made with uv on first use, and kept. Memory is of all processes of a server after the load:
resident, and proportional (shared pages divided by who shares them). The machine's load is told: other work on it
lengthens everything.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from benchmarks.serving.servers import OURS, ROOT, Server, environment_of, servers_of, write_models

CLIENTS = (1, 8, 32)
TOLERANCE = 1e-5


@dataclass(kw_only=True)
class Measured:
    """What was measured of one server."""

    ready_seconds: dict[str, float] = field(default_factory=dict)  # from its start, cold and warm
    first_ms: dict[str, float] = field(default_factory=dict)  # milliseconds of the first answer, cold and warm
    # By the number of clients, one of each round, as `benchmarks.serving.load` prints it
    loads: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)  # after the loads

    def median(self, num_clients: int, key: str) -> float:
        """Return the median over the rounds."""
        return statistics.median(load[key] for load in self.loads[num_clients])


def body_of(images: np.ndarray) -> bytes:
    """Return the body of a request for images, as MLflow's server takes it."""
    return json.dumps({"inputs": images.tolist()}).encode()


def check_answers(servers: Sequence[Server], images: np.ndarray, expected: np.ndarray) -> None:
    """End the benchmark where a server's probabilities are not those of the export."""
    for server in servers:
        difference = np.abs(server.probabilities(body_of(images)) - expected).max()
        if difference > TOLERANCE:
            raise SystemExit(f"{server.name}: probabilities differ by {difference:.2g}; at most {TOLERANCE:g}")


def load(server: Server, body: bytes, num_clients: int, seconds: float) -> dict[str, float]:
    """Load a server by a process of its own; `cpu_ms` is the server's processor time for a request."""
    command = [sys.executable, "-m", "benchmarks.serving.load", f"http://127.0.0.1:{server.port}/invocations"]
    command += ["--clients", str(num_clients), "--seconds", str(seconds)]
    before = server.cpu_seconds()
    done = subprocess.run(command, input=body, cwd=ROOT, capture_output=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    found["cpu_ms"] = 1000 * (server.cpu_seconds() - before) / found["sent"]
    if found["errors"]:
        raise SystemExit(f"{server.name}: {found['errors']} requests of {found['requests']} failed")
    return found


def measure_starts(server: Server, body: bytes, found: Measured) -> None:
    """Start a server cold, then warm twice, of which the second counts: the first may fill the cache."""
    for name, is_cold in (("cold", True), ("warm", False), ("warm", False)):
        with server.running(is_cold=is_cold) as seconds:
            started = time.perf_counter()
            server.probabilities(body)
            found.first_ms[name] = 1000 * (time.perf_counter() - started)
            found.ready_seconds[name] = seconds


def measure(kind: str, environments: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all servers of one network; return the results by server."""
    from gradtrail.stages.model.exported import read_export

    images = np.random.default_rng(1).integers(0, 256, (16, 28, 28), np.uint8)
    one = body_of(images[:1])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        export, logged = write_models(kind, Path(folder))
        servers = servers_of(export, logged, environments)
        found = {name: Measured() for name in servers}
        for name, server in servers.items():
            measure_starts(server, one, found[name])
        for server in servers.values():
            stack.enter_context(server.running())
        check_answers([*servers.values()], images, read_export(export).predict(images))
        for number in range(options.rounds):
            for num_clients in CLIENTS:
                for name in sorted(servers, reverse=bool(number % 2)):
                    seen = load(servers[name], one, num_clients, options.seconds)
                    found[name].loads.setdefault(num_clients, []).append(seen)
        for name, server in servers.items():
            found[name].memory = server.memory()
    show(kind, found)
    return {"servers": {name: vars(each) for name, each in found.items()}}


def ratio(found: Mapping[str, Measured], peer: str, num_clients: int, key: str) -> float:
    """Return the median over rounds of ours by a peer's."""
    pairs = zip(found[OURS].loads[num_clients], found[peer].loads[num_clients], strict=True)
    return statistics.median(ours[key] / theirs[key] for ours, theirs in pairs)


def show(kind: str, found: Mapping[str, Measured]) -> None:
    """Print the tables of one network."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    starts = Table(title=f"{kind}: starts and memory (load averages: {load}; {os.cpu_count()} cores)")
    starts.add_column("server")
    for title in ("ready cold, s", "ready warm, s", "first cold, ms", "first warm, ms", "RSS, MiB", "PSS, MiB"):
        starts.add_column(title, justify="right")
    for name, each in found.items():
        seconds = (f"{each.ready_seconds[key]:.2f}" for key in ("cold", "warm"))
        first = (f"{each.first_ms[key]:.1f}" for key in ("cold", "warm"))
        starts.add_row(name, *seconds, *first, *(f"{each.memory[key]:.0f}" for key in ("rss_mib", "pss_mib")))
    loads = Table(title=f"{kind}: one image a request; ours/peer is the median of each round's ratio")
    loads.add_column("server")
    titles = ("clients", "p50, ms", "p95, ms", "p99, ms", "requests/s", "CPU ms a request", "p50 ours/peer")
    for title in (*titles, "p99 ours/peer", "requests/s ours/peer", "load's share of a core"):
        loads.add_column(title, justify="right")
    for num_clients in CLIENTS:
        for name, each in found.items():
            values = [f"{each.median(num_clients, key):.2f}" for key in ("p50_ms", "p95_ms", "p99_ms")]
            ratios = [f"{ratio(found, name, num_clients, key):.2f}" for key in ("p50_ms", "p99_ms", "per_second")]
            rate, cpu, busy = (each.median(num_clients, key) for key in ("per_second", "cpu_ms", "busy"))
            loads.add_row(name, str(num_clients), *values, f"{rate:,.0f}", f"{cpu:.2f}", *ratios, f"{busy:.0%}")
    console = Console(width=140)
    console.print(starts)
    console.print(loads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda names: names.split(","), default=["mlp", "cnn"])
    parser.add_argument("--peers", type=lambda names: names.split(","), default=["onnx", "torch"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of each load")
    parser.add_argument("--environments", type=Path, default=ROOT / ".gradtrail" / "benchmarks")
    options = parser.parse_args()
    environments = {peer: environment_of(peer, options.environments.absolute()) for peer in options.peers}
    results = {kind: measure(kind, environments, options) for kind in options.models}
    options.environments = None  # a path of this machine
    record("serving", results, options)


if __name__ == "__main__":
    main()
