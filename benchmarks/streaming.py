"""Training on more data than memory holds, beside the same on data in memory: speed, memory, a kill, accuracy.

    python -m benchmarks.streaming [--versions 1,9,27,135] [--memory-gib 2] [--folder /tmp/streaming]

The stages `preprocess`, `train`, `evaluate` and `gradients`, by `params.yaml` but for the number of deformed versions,
shards, one epoch and no tracking. Those on shards run in a control group that has `--memory-gib` in all, the kernel's
cache of files included, where one may be made; else with as much address space for data. Two more ask for rates in
turn, in one process: of gradient norms of every example, and of a training of 60,000.

Rates are ratios to those of data in memory, measured just before and just after. The folder takes 1 KB an example.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from benchmarks.record import record

ROOT = Path(__file__).parents[1]
_COPIED = ("dvc.yaml", "versions.yaml", "pipeline", "src", "labels", "pyproject.toml")
_GIB = 2**30
_EPOCH = re.compile(r"validation ([\d.]+)% \((\d+)/\d+, ([\d.]+) s\)")


class Project:
    """A copy of the project's stages in a folder of its own, without DVC and tracking."""

    def __init__(self, folder: Path, params: dict[str, Any]):
        self.folder = folder
        folder.mkdir(parents=True)
        for name in _COPIED:
            source = ROOT / name
            copy: Callable[..., Any] = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / name)
        shutil.copytree(ROOT / "data/raw", folder / "data/raw")
        self.set({"runtime.tracking": False, "runtime.system_metrics": False} | params)

    def set(self, params: dict[str, Any]) -> None:
        """Change params by their dotted keys."""
        yaml = YAML()
        path = self.folder / "params.yaml"
        content = yaml.load(path if path.exists() else ROOT / "params.yaml")
        for key, value in params.items():
            *sections, last = key.split(".")
            section = content
            for name in sections:
                section = section[name]
            section[last] = value
        yaml.dump(content, path)

    def start(
        self, stage: str, enter: Callable[[], None] | None = None, said: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a stage, which prints into `said`; `enter` is called in the new process."""
        env = os.environ | {"PYTHONPATH": str(self.folder / "src")}
        command = [sys.executable, "-m", f"pipeline.{stage}"]
        pipes: dict[str, Any] = {"stdout": said or subprocess.DEVNULL, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=env, preexec_fn=enter, **pipes)  # noqa: PLW1509

    def run(self, stage: str, enter: Callable[[], None] | None = None) -> dict[str, Any]:
        """Run a stage to its end; return its seconds, its peak memory in MiB, and what it printed."""
        started, peak = time.perf_counter(), 0
        with tempfile.TemporaryFile("w+") as said:
            process = self.start(stage, enter, said)
            while process.poll() is None:
                peak = max(peak, _peak_of(process.pid))
                time.sleep(0.05)
            said.seek(0)
            text = said.read()
        if process.returncode:
            raise SystemExit(f"{stage} ended with {process.returncode}:\n{text}")
        return {"seconds": time.perf_counter() - started, "peak_mib": peak / 2**20, "said": text}

    def metrics(self, stage: str) -> dict[str, Any]:
        """Read the metrics of a stage."""
        found: dict[str, Any] = json.loads((self.folder / f"metrics/{stage}.json").read_text())
        return found

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file that `train` wrote."""
        files = [path for out in ("models", "results/train") for path in sorted((self.folder / out).rglob("*"))]
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.is_file()
        }


def _peak_of(pid: int) -> int:
    """Return the most memory that a process has had resident, in bytes; 0 where that is not known any more."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def limited(gib: float) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield how processes are held to so much memory, and what each calls to be."""
    limit = int(gib * _GIB)
    for parent, file in _groups():
        group = parent / f"gradtrail-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
        except OSError:
            continue
        try:
            yield "control group", functools.partial(_join, group)
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    yield "data segment", lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _groups() -> Iterator[tuple[Path, str]]:
    """Yield the folders in which a control group may be made, with the file of its limit, of both versions."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds == "memory":
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        elif not kinds:
            yield Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"


def train_seconds(said: str) -> float:
    """Return the seconds of the loop of a training until its last epoch, from what it printed."""
    return float(_EPOCH.findall(said)[-1][2])


def in_memory(folder: Path, epochs: int) -> Project:
    """Prepare a training on plain MNIST, whole on the device."""
    project = Project(folder, {"train.epochs": epochs, "train.keep_epochs": [0]})
    project.run("preprocess")
    return project


def rate_in_memory(project: Project, epochs: int) -> float:
    """Return the examples per second of a training on the whole split."""
    return epochs * project.metrics("preprocess")["train_examples"] / train_seconds(project.run("train")["said"])


def measure(versions: int, folder: Path, plain: Project, epochs: int, memory_gib: float) -> dict[str, Any]:
    """Return what the stages take with so many versions of each digit, in limited memory."""
    rounds = 1 if versions > 1 else epochs
    params = {"preprocess.deformations": versions, "preprocess.shard_mib": 64, "train.epochs": rounds}
    params |= {"train.keep_epochs": [0], "runtime.stream_above_mib": 0.0, "runtime.checkpoint_seconds": 15.0}
    project = Project(folder, params)
    with limited(memory_gib) as (how, enter):
        made = project.run("preprocess", enter)
        before = rate_in_memory(plain, epochs)
        train = project.run("train", enter)
        after = rate_in_memory(plain, epochs)
        evaluate = project.run("evaluate", enter)
    count = project.metrics("preprocess")["train_examples"]
    rate = rounds * count / train_seconds(train["said"])
    seconds, reference = train_seconds(train["said"]), statistics.mean([before, after])
    return {
        "versions": versions,
        "examples": count,
        "held_by": how,
        "preprocess_seconds": made["seconds"],
        "preprocess_peak_mib": made["peak_mib"],
        "train_seconds": seconds,
        "epochs": rounds,
        "examples_per_second": rate,
        "in_memory_examples_per_second": [before, after],
        "ratio": rate / reference,
        "train_peak_mib": train["peak_mib"],
        "evaluate_peak_mib": evaluate["peak_mib"],
        "accuracy": project.metrics("evaluate")["accuracy"],
    }


def kill(folder: Path, memory_gib: float, after_seconds: float) -> dict[str, Any]:
    """Kill the training of a measured project in the middle, resume it, and compare all bytes."""
    project = Project.__new__(Project)
    project.folder = folder
    expected = project.digests()
    with limited(memory_gib) as (_, enter):
        process = project.start("train", enter)
        time.sleep(after_seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resumed = project.run("train", enter)
    found = re.search(r"resuming after step ([\d,]+)", resumed["said"])
    return {"resumed_after_step": found[1] if found else "none", "same_bytes": project.digests() == expected}


def score(folder: Path, memory_gib: float) -> dict[str, Any]:
    """Score every example of a measured project, and 60,000 examples in memory, in turn, in a process of its own."""
    env = os.environ | {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}"}
    with limited(memory_gib) as (_, enter):
        command = [sys.executable, "-m", "benchmarks.streaming_norms", str(folder / "scores.parquet")]
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=enter)  # noqa: PLW1509
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the scores of every example ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the measurements as a table."""
    table = Table("versions", "examples", "examples/s", "of in memory", "peak MiB of train", "test accuracy")
    for row in rows:
        rate, ratio = f"{row['examples_per_second']:,.0f}", f"{row['ratio']:.2f}"
        peak, accuracy = f"{row['train_peak_mib']:,.0f}", f"{row['accuracy']:.2%}"
        table.add_row(str(row["versions"]), f"{row['examples']:,}", rate, ratio, peak, accuracy)
    Console().print(table)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default="1,9,27,135", help="of each digit; each is measured by itself")
    parser.add_argument("--memory-gib", type=float, default=2.0, help="that the stages on shards have")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "streaming", help="for the data")
    parser.add_argument("--epochs", type=int, default=10, help="of the training in memory beside")
    options = parser.parse_args()
    counts = [int(count) for count in options.versions.split(",")]
    shutil.rmtree(options.folder, ignore_errors=True)
    plain = in_memory(options.folder / "plain", options.epochs)
    rate_in_memory(plain, options.epochs)  # warms up
    results: dict[str, Any] = {"rows": []}
    for versions in counts:
        folder = options.folder / str(versions)
        row = measure(versions, folder, plain, options.epochs, options.memory_gib)
        results["rows"].append(row)
        print(json.dumps(row))
    plain.run("evaluate")
    results["plain_accuracy"] = plain.metrics("evaluate")["accuracy"]
    largest = options.folder / str(counts[-1])
    results["killed"] = kill(largest, options.memory_gib, results["rows"][-1]["train_seconds"] / 2)
    print(json.dumps(results["killed"]))
    results["norms"] = score(largest, options.memory_gib)
    print(json.dumps(results["norms"]))
    show(results["rows"])
    options.folder = str(options.folder)
    record("streaming", results, options)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
