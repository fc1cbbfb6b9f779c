"""The real project in a temporary folder, and what a person does in a project: commands, params, runs."""

import compileall
import contextlib
import functools
import json
import operator
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML
from warm_python import made_once, warm_python
from xla_flags import OLDER_EMITTERS

from gradtrail.stages.common.files import digest
from gradtrail.stages.common.params import params_file
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.tracking.tags import is_alive

ROOT = Path(__file__).resolve().parents[2]
STAGES = tuple(read_pipeline(ROOT / "dvc.yaml"))
_LONGEST = 600  # seconds that no command takes: a command that hangs is a failure
COPIED = ("dvc.yaml", "params.yaml", ".gitignore", ".dvcignore", "pyproject.toml")

QUICK = {
    # Compiling takes most of the time of a finished project and its copies
    "environment.xla_flags": ["--xla_backend_optimization_level=0", *OLDER_EMITTERS],
    "fetch.dataset": "digits",
    "preprocess.label_noise": 0.1,
    "train.epochs": 3,
    "train.mlp.hidden": [32],
    "train.precision": "float16",
    "train.keep_epochs": [0, 2, 99],
    "evaluate.num_mistakes": 5,
    "gradients.num_largest": 5,
    "gradients.num_suspects": 5,
    "profile.smallest_batch_size": 128,
    "profile.largest_batch_size": 128,
    "profile.seconds": 0.1,
    "profile.precisions": ["float32"],
}


@dataclass(frozen=True)
class Project:
    """A project's folder, and the commands that a person would type in it."""

    folder: Path

    def copy(self, to: Path) -> "Project":
        """Copy the folder; what first opens the store there relocates its artifacts."""
        self.wait_for_shipping()
        return Project(Path(shutil.copytree(self.folder, to, symlinks=True)))

    def run(self, *command: str, env: Mapping[str, str] | None = None, status: int = 0) -> str:
        """Run a command that ends with this exit status, with a Python that starts at once; return what it printed."""
        result = subprocess.run(command, check=False, timeout=_LONGEST, **self._options(warm() | dict(env or {})))
        assert result.returncode == status, f"{command} ended with {result.returncode}:\n{result.stdout}"
        self.wait_for_shipping()
        return result.stdout

    def python(self, *arguments: str, env: Mapping[str, str] | None = None, status: int = 0) -> str:
        """Run Python with the project's own code; return what it printed."""
        own_code = {"PYTHONPATH": str(self.folder / "src")}
        return self.run(str(warm_python()), *arguments, env=own_code | dict(env or {}), status=status)

    def gradtrail(self, *arguments: str, **options: Any) -> str:
        return self.python("-m", "gradtrail", *arguments, **options)

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command in the folder, in a process group of its own."""
        return subprocess.Popen(command, start_new_session=True, **self._options(env))

    def _options(self, env: Mapping[str, str] | None) -> dict[str, Any]:
        """Say where and with what environment a command runs, and that all it prints is one text."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return {"cwd": self.folder, "env": environment() | dict(env or {}), **streams}

    def start_stage(self, name: str, *under: str) -> subprocess.Popen[str]:
        """Start a stage by hand; `under` a command such as `nice` with the real interpreter."""
        python = sys.executable if under else str(warm_python())
        return self.start(*under, python, "-m", f"pipeline.{name}", env={"PYTHONPATH": str(self.folder / "src")})

    def start_dvc(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start(str(warm_python()), "-m", "dvc", *arguments, env=warm())

    def run_stage(self, name: str, *under: str) -> str:
        process = self.start_stage(name, *under)
        output, _ = process.communicate(timeout=_LONGEST)
        assert process.returncode == 0, output
        self.wait_for_shipping()
        return output

    def digests(self, *outs: str) -> dict[str, str]:
        """Return the digest of each out; an empty one where it is missing."""
        return {out: digest(self.folder / out) if (self.folder / out).exists() else "" for out in outs}

    def dvc(self, *arguments: str, **options: Any) -> str:
        return self.run(str(warm_python()), "-m", "dvc", *arguments, **options)

    def git(self, *arguments: str) -> str:
        return self.run("git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def start_queue(self, jobs: int) -> None:
        """Start workers of DVC's queue. They inherit its output, so that a pipe would wait for the last of them."""
        command = (sys.executable, "-m", "dvc", "queue", "start", "--jobs", str(jobs))
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, check=True, timeout=_LONGEST, **(self._options(warm()) | streams))

    def wait_for_queue(self, seconds: float = 240) -> str:
        """Return the status of DVC's queue once nothing waits or runs any more, or when the time is up.

        Workers that are still there are ended: of two, one now and then misses the word to stop, and waits for ever.
        """
        deadline = time.monotonic() + seconds
        while True:
            status = self._queue_status()
            if time.monotonic() > deadline or not any(state in status for state in ("Queued", "Running")):
                for worker in self.processes("queue-worker"):
                    worker.kill()
                return status
            time.sleep(1)

    def _queue_status(self) -> str:
        for _ in range(3):  # DVC fails while a worker writes the file about its task
            with contextlib.suppress(AssertionError):
                return self.dvc("queue", "status")
            time.sleep(0.5)
        return self.dvc("queue", "status")

    def processes(self, argument: str = "") -> list[psutil.Process]:
        """Return the processes, or those with an argument, that are at work in the project or a copy below it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (not argument or argument in process.cmdline()) and Path(process.cwd()).is_relative_to(self.folder):
                    found.append(process)
        return found

    def ran(self, output: str) -> list[str]:
        """Return the stages that DVC ran, from what it printed."""
        return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]

    def set(self, key: str, value: Any) -> None:
        self.change({key: value})

    def change(self, params: Mapping[str, Any]) -> None:
        """Write values into the params files, by key."""
        yaml = YAML()
        files = {key: self.folder / params_file(key.partition(".")[0]) for key in params}
        for path in {*files.values()}:
            content = yaml.load(path)
            for key in (key for key, file in files.items() if file == path):
                *parents, last = key.split(".")
                functools.reduce(operator.getitem, parents, content)[last] = params[key]
            yaml.dump(content, beside := path.with_suffix(".tmp"))
            beside.replace(path)  # a stage that is starting reads the old file or the new one

    def get(self, key: str) -> Any:
        content = YAML().load(self.folder / params_file(key.partition(".")[0]))
        return functools.reduce(operator.getitem, key.split("."), content)

    @contextlib.contextmanager
    def holding(self, stage: str) -> Iterator[Callable[[], bool]]:
        """Let a stage wait at the start of its work while `.git/hold` exists; yield whether its last run is open."""
        code = self.folder / "src/gradtrail/tracking/live.py"  # no code dep of a stage
        whole, begin = code.read_text(), "                yield run\n"
        assert whole.count(begin) == 1
        wait = f"while stage.name == {stage!r} and Path('.git/hold').exists():\n                    time.sleep(0.01)"
        code.write_text(whole.replace(begin, f"                {wait}\n{begin}"))
        (self.folder / ".git" / "hold").write_text(stage)

        def has_begun() -> bool:
            time.sleep(0.05)  # readers that never pause keep SQLite's writers waiting
            with contextlib.suppress(sqlite3.OperationalError):
                return [run["status"] for run in self.runs_of(stage)][:1] == ["RUNNING"]
            return False

        try:
            yield has_begun
        finally:
            code.write_text(whole)
            (self.folder / ".git" / "hold").unlink(missing_ok=True)

    def metrics_of(self, stage: str) -> dict[str, Any]:
        """Return all metrics of a stage, those that people compare and the others."""
        files = f"results/metrics/{stage}.json", f"results/{stage}/other_metrics.json"
        paths = [self.folder / file for file in files if (self.folder / file).exists()]
        return {key: value for path in paths for key, value in json.loads(path.read_text()).items()}

    def lock(self) -> bytes:
        return (self.folder / "dvc.lock").read_bytes()

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs of the project's store, the newest first, read from its tables: importing MLflow is slow."""
        self.wait_for_shipping()
        queries = {
            "tags": "select key, value from tags where run_uuid = ?",
            "params": "select key, value from params where run_uuid = ?",
            "metrics": "select key, value from latest_metrics where run_uuid = ?",
        }
        with contextlib.closing(sqlite3.connect(self.folder / "mlflow.db")) as store:
            columns = "run_uuid, name, status, artifact_uri"
            kept = f"select {columns} from runs where lifecycle_stage = 'active' order by start_time desc"  # noqa: S608
            runs = store.execute(kept).fetchall()
            return [
                {"id": run, "name": name, "status": status, "artifacts": Path(place.removeprefix("file://"))}
                | {"outs": json.loads(found["tags"].get("mlflow.gradtrail.outs", "{}")), **found}
                for run, name, status, place in runs
                for found in [{kind: dict(store.execute(query, (run,))) for kind, query in queries.items()}]
            ]

    def wait_for_shipping(self) -> None:
        """Wait until the records of stages that have ended are in the store, or nobody ships them."""
        deadline = time.monotonic() + 60
        while self._has_records_to_ship() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _has_records_to_ship(self) -> bool:
        with contextlib.suppress(OSError, ValueError):  # it was shipped meanwhile, or is damaged
            for path in self.folder.glob(".gradtrail/records/*/*/run.json"):
                info = json.loads(path.read_text())
                has_ended = info["status"] != "RUNNING" or not is_alive(info["tags"])
                if has_ended and not path.with_name("fault").exists() and _is_running("gradtrail.tracking"):
                    return True
        return False

    def delete_run(self, run_id: str) -> None:
        """Do to a run what MLflow does if a person deletes it."""
        deleted = "update runs set lifecycle_stage = 'deleted', deleted_time = ? where run_uuid = ?"
        with contextlib.closing(sqlite3.connect(self.folder / "mlflow.db")) as store, store:
            store.execute(deleted, (int(time.time() * 1000), run_id))

    def empty_store(self) -> None:
        """Put a store without runs in the place of the project's: what is left of one that was lost and made anew."""
        path, template = self.folder / "mlflow.db", empty_store()
        path.unlink(missing_ok=True)
        shutil.copy(template / "mlflow.db", path)
        with contextlib.closing(sqlite3.connect(path)) as store, store:  # else it would say that it was moved
            moved = "update experiments set artifact_location = replace(artifact_location, ?, ?)"
            store.execute(moved, (str(template), str(self.folder)))

    def sync(self, **env: str) -> str:
        return self.gradtrail("sync", env=env)

    def runs_of(self, stage: str) -> list[dict[str, Any]]:
        return [run for run in self.runs() if run["tags"].get("stage") == stage]


def _is_running(module: str) -> bool:
    return any(module in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def stop(process: subprocess.Popen[str], number: signal.Signals, *, when: Callable[[], bool]) -> tuple[str, float]:
    """Send a signal to a process and all below it, at a moment or where it ends before; wait for its end.

    Returns:
        What it printed, and the seconds from the signal to the end.
    """
    deadline = time.monotonic() + _LONGEST
    while not when() and process.poll() is None:
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.002)
    sent = time.monotonic()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=120)
    return output, time.monotonic() - sent


def warm() -> dict[str, str]:
    """Return what of the environment makes the stages' Python one that starts at once."""
    folder = warm_python().parents[1]
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{environment()['PATH']}"}


def besides_progress(lines: Iterable[str]) -> list[str]:
    """Return what a stage printed, but for its progress and the line with which it ends: those say how long it took."""
    return [line for line in lines if not re.match(r"\w+: .*\d s\)?$", line)]


def environment() -> dict[str, str]:
    """Return the environment of a person's shell in which this interpreter's environment is active."""
    without = ("DVC_", "MLFLOW_", "GRADTRAIL_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    switches = {"DVC_NO_ANALYTICS": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"}
    return kept | switches | {"PATH": path, "VIRTUAL_ENV": str(Path(sys.executable).parents[1])}


def finished_project() -> Project:
    """Return the real project whose pipeline ran once on the digits; to be copied, not to be changed."""
    return Project(made_once(_finish_project, "digits"))


def warnings_in(output: str) -> list[str]:
    """Return the lines with a warning, without the one that digits have few validation images."""
    return [line for line in output.splitlines() if "warning" in line and "the temperature was fitted" not in line]


def _finish_project(folder: Path) -> None:
    project = copy_project(folder)
    project.change(QUICK)
    project.commit("quick params")
    output = project.dvc("repro")
    assert project.ran(output) == list(STAGES)
    assert not warnings_in(output), output
    assert re.search(r"^report: accuracy 0\.\d+, [\d.]+ s$", output, re.MULTILINE), output
    project.commit("results")


def empty_store() -> Path:
    """Return the folder of a store without runs, which takes MLflow seconds; to be copied, not to be changed."""

    def make(folder: Path) -> None:
        ((status, _),) = create_store(folder, at_once=1)
        assert status == 0

    return made_once(make, "store")


def create_store(folder: Path, *, at_once: int) -> list[tuple[int, bytes]]:
    """Create a store by so many processes at once; return the status of each and the id of the experiment `models`."""
    folder.mkdir(exist_ok=True)
    code = (
        "from gradtrail.tracking.store import experiment_id, open_store; print(experiment_id(open_store(), 'models'))"
    )
    env = environment() | {"DVC_ROOT": str(folder), "PYTHONPATH": str(ROOT / "src")}
    command = [warm_python(), "-c", code]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(at_once)]
    outputs = [process.communicate()[0] for process in started]
    return [(process.returncode, out) for process, out in zip(started, outputs, strict=True)]


def compiled_code() -> Path:
    """Return a folder with the code, compiled; to be copied, not to be changed."""
    return made_once(_compile_code, "code")


def _compile_code(folder: Path) -> None:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    optional = ("audit", "privacy_audit", "what_if")
    shutil.copytree(ROOT / "pipeline", folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__", *optional))
    assert compileall.compile_dir(folder, quiet=2)


def copy_project(to: Path) -> Project:
    """Copy the real project, without results, into a new folder under git and DVC."""
    shutil.copytree(compiled_code(), to)
    for name in COPIED:
        shutil.copy(ROOT / name, to)
    return initialize(Project(to))


def initialize(project: Project) -> Project:
    """Put a new project under git and DVC, with a store without runs."""
    project.git("init", "-q")
    project.dvc("init", "-q")
    project.commit("a project")
    project.empty_store()
    return project
