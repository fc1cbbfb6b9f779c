"""Training on more data than memory holds, beside the same on data in memory: speed, memory, a kill.

    python -m benchmarks.streaming [--versions 1,9,27,135] [--memory-gib 2] [--folder FOLDER] [--model mlp]

The stages `preprocess` and `train`, by `params.yaml` but for copies of the digits, one epoch and no tracking, in a
control group that has `--memory-gib` in all, the kernel's cache of files included, where one may be made; else with
as much for data. Then a training of the largest is killed in the middle, and `streaming_rates` compares its rates with
those of data in memory. The folder takes 1 KB an example.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from benchmarks.record import record
from gradtrail.stages.data.data_files import read_info, write_info

ROOT = Path(__file__).parents[1]
_COPIED = ("dvc.yaml", "pipeline", "src", "pyproject.toml")
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
        """Run a stage to its end; return its seconds, its peak of anonymous memory in MiB, and what it printed."""
        started, peak = time.perf_counter(), 0
        with tempfile.TemporaryFile("w+") as said:
            process = self.start(stage, enter, said)
            while process.poll() is None:
                peak = max(peak, _resident_of(process.pid))
                time.sleep(0.05)
            said.seek(0)
            text = said.read()
        if process.returncode:
            raise SystemExit(f"{stage} ended with {process.returncode}:\n{text}")
        return {"seconds": time.perf_counter() - started, "peak_mib": peak / 2**20, "said": text}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of every file that `train` wrote."""
        files = [path for out in ("models", "results/train") for path in sorted((self.folder / out).rglob("*"))]
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.is_file()
        }


def _resident_of(pid: int) -> int:
    """Return the resident memory of a process that is not mapped from files, in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
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


def copied(project: Project, versions: int) -> None:
    """Put copies of the digits in the place of the training split."""
    folder = project.folder / "data/processed"
    info = read_info(folder)
    for path in (folder / "train").iterdir():
        column = np.load(path)
        size = (versions * len(column), *column.shape[1:])
        copies = np.lib.format.open_memmap(path, "w+", column.dtype, size)
        for copy in range(versions):
            ids = 60_000 * copy if path.stem == "example_id" else 0
            copies[copy * len(column) : (copy + 1) * len(column)] = column + column.dtype.type(ids)
    write_info(folder, dataclasses.replace(info, examples=info.examples | {"train": size[0]}))


def measure(versions: int, project: Project, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the stages take with so many versions of each digit, in limited memory."""
    with limited(options.memory_gib) as (how, enter):
        made = project.run("preprocess", enter)
        copied(project, versions)
        train = project.run("train", enter)
    return {
        "versions": versions,
        "examples": read_info(project.folder / "data/processed").examples["train"],
        "held_by": how,
        "preprocess_seconds": made["seconds"],
        "preprocess_peak_mib": made["peak_mib"],
        "train_seconds": train_seconds(train["said"]),
        "train_peak_mib": train["peak_mib"],
    }


def kill(project: Project, memory_gib: float, after_seconds: float) -> dict[str, Any]:
    """Kill the training of a measured project in the middle, resume it, and compare all bytes."""
    expected = project.digests()
    with limited(memory_gib) as (_, enter):
        process = project.start("train", enter)
        time.sleep(after_seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resumed = project.run("train", enter)
    found = re.search(r"resuming after step ([\d,]*\d)", resumed["said"])
    return {"resumed_after_step": found[1] if found else "none", "same_bytes": project.digests() == expected}


def rates(project: Project, memory_gib: float) -> dict[str, Any]:
    """Return what `streaming_rates` finds for a measured project."""
    env = os.environ | {"PYTHONPATH": f"{project.folder / 'src'}{os.pathsep}{ROOT}"}
    with limited(memory_gib) as (_, enter):
        command = [sys.executable, "-m", "benchmarks.streaming_rates"]
        options: dict[str, Any] = {"cwd": project.folder, "env": env, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, preexec_fn=enter, **options)  # noqa: PLW1509
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the rates ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def show(results: dict[str, Any]) -> None:
    """Print the measurements as a table."""
    table = Table("versions", "examples", "seconds of train", "peak MiB of train")
    for row in results["rows"]:
        seconds, peak = f"{row['train_seconds']:,.1f}", f"{row['train_peak_mib']:,.0f}"
        table.add_row(str(row["versions"]), f"{row['examples']:,}", seconds, peak)
    Console().print(table)
    print(json.dumps({name: found for name, found in results.items() if name != "rows"}))


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default="1,9,27,135", help="copies of each digit; each is measured by itself")
    parser.add_argument("--memory-gib", type=float, default=2.0, help="that the stages have")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "streaming", help="for the data")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--no-rates", action="store_true")
    options = parser.parse_args()
    if sys.platform != "linux":
        parser.error("needs Linux, whose control groups limit memory and whose /proc has that of a process")
    params = {"train.epochs": 1, "train.keep_epochs": [0], "runtime.checkpoint_seconds": 10.0}
    params["train.model"] = options.model
    shutil.rmtree(options.folder, ignore_errors=True)
    project = Project(options.folder, params)
    results: dict[str, Any] = {"rows": []}
    for versions in map(int, options.versions.split(",")):
        results["rows"].append(measure(versions, project, options))
        print(json.dumps(results["rows"][-1]), flush=True)
    results["killed"] = kill(project, options.memory_gib, 10 + results["rows"][-1]["train_seconds"] / 2)
    print(json.dumps(results["killed"]), flush=True)
    if not options.no_rates:
        results["rates"] = rates(project, options.memory_gib)
    show(results)
    options.folder = str(options.folder)
    record("streaming", results, options)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
