"""A run as files: what a stage, or its outputs later, say about it, before MLflow has it.

A record is a folder `.gradtrail/records/<state>/<attempt>/`:

    run.json       what the run is, as `RunInfo`, with a digest of itself
    metrics.jsonl  a point per line: key, value, step, time; a point without a step is one per attempt
    artifacts/     laid out as in MLflow
    attempt/       artifacts that each attempt adds; from the second attempt on, their names end with its number
    export/        an export, which becomes a logged model of its training

`render.py` writes it, and knows no MLflow; `ship.py` brings it to MLflow, and knows no stages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from filelock import FileLock

from gradtrail.stages.common.files import atomic_file, digest, write_json
from gradtrail.support.errors import one_line
from gradtrail.support.paths import SQLITE, database_path, private_folder, root, store_uri
from gradtrail.tracking.names import rounded

RUN, METRICS, ARTIFACTS, ATTEMPT, MODEL = "run.json", "metrics.jsonl", "artifacts", "attempt", "export"
FAULT, SHIPPED = "fault", "shipped.json"  # shipping failed; the run that a shipper opened for the record
RUNNING, FINISHED, FAILED, KILLED = "RUNNING", "FINISHED", "FAILED", "KILLED"
Points = Mapping[str, Mapping[Any, float]]  # name → step, or None for one point of each attempt → value


class BadRecordError(Exception):
    """A record is damaged, or of another version."""


class Point(NamedTuple):
    """A value of a metric."""

    key: str
    value: float
    step: int | None  # None: one point per attempt
    time: float  # seconds since the epoch


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set that a run read."""

    name: str
    digest: str
    uri: str
    context: str


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What MLflow's page of a run shows, apart from metrics and artifacts."""

    version: int = 1  # of the format
    store: str  # the store's address; empty for the database in the root, which may move
    experiment: str  # data | models
    stage: str
    state: str
    name: str
    tags: dict[str, str | None]  # None removes a tag of an earlier attempt
    params: dict[str, str]
    began: float  # seconds since the epoch
    ended: float | None = None
    status: str = RUNNING
    outs: dict[str, str] | None = None  # path → digest, once the stage has finished
    datasets: list[Dataset] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)  # artifacts that MLflow's UI shows as tables
    files: dict[str, str] = field(default_factory=dict)  # file of the closed record → digest


class Record:
    """The record of one attempt, or of a run that is rebuilt."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.artifacts = folder / ARTIFACTS
        self._lock = threading.Lock()

    def write(self, info: RunInfo) -> None:
        """Write what the run is to the disk, in one step: whoever ships it may remove the record once it is closed."""
        content = dataclasses.asdict(info)
        with atomic_file(self.folder / RUN) as temporary:
            write_json(temporary, content | {"digest": _digest_of(content)})
            _flush(temporary)
        with contextlib.suppress(FileNotFoundError):
            _flush(self.folder)

    def read(self) -> RunInfo:
        """Return what the run is; raise BadRecordError for a damaged record or one of another version."""
        try:
            content = json.loads((self.folder / RUN).read_bytes())
            if content.pop("digest") != _digest_of(content) or content["version"] != RunInfo.version:
                raise ValueError("its digest differs from its content, or its version from this one")
            return RunInfo(**content | {"datasets": [Dataset(**one) for one in content["datasets"]]})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadRecordError(f"{self.folder / RUN}: {one_line(error)[:200]}") from None

    def add_points(self, points: Points) -> None:
        """Add points of curves, of now; of two at one step, the first counts."""
        with self._lock, (self.folder / METRICS).open("a", encoding="utf-8") as file:
            for key, curve in points.items():
                for step, value in curve.items():
                    point = Point(key, rounded(value), None if step is None else int(step), time.time())
                    file.write(json.dumps(point._asdict()) + "\n")

    def points(self, offset: int = 0) -> tuple[list[Point], int]:
        """Return the points after an offset in bytes, and the offset after them; a line that is not whole yet waits."""
        path = self.folder / METRICS
        if not path.exists() or path.stat().st_size <= offset:
            return [], offset
        with path.open("rb") as file:
            file.seek(offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        try:
            points = [Point(**json.loads(line)) for line in whole.splitlines()]
            if any(type(one.key) is not str or type(one.step) not in (int, type(None)) for one in points):
                raise ValueError("not a point")
            return [one._replace(value=float(one.value), time=float(one.time)) for one in points], offset + len(whole)
        except (ValueError, TypeError) as error:
            raise BadRecordError(f"{path}: {one_line(error)[:200]}") from None

    def copy(self, path: Path, to: str) -> None:
        """Copy a file, or the files of a folder, as they are now, to an artifact, in place of earlier ones."""
        target = self.artifacts / to
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target)

    def digests(self) -> dict[str, str]:
        """Return the digest of each file that a stage wrote, by its path, `run.json` aside."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and path.name not in (RUN, SHIPPED, FAULT)]
        return {path.relative_to(self.folder).as_posix(): digest(path) for path in paths}

    def flush(self) -> None:
        """Return once all is on the disk, so that it survives a loss of power."""
        for path in (*self.folder.rglob("*"), self.folder, self.folder.parent):
            _flush(path)

    def last_change(self) -> float:
        """Return when the record was written last, in seconds since the epoch: the end of a stage that was killed."""
        return max((self.folder / name).stat().st_mtime for name in (RUN, METRICS) if (self.folder / name).exists())

    @property
    def has_fault(self) -> bool:
        """Whether shipping failed, or took too long, and somebody was told."""
        return (self.folder / FAULT).exists()

    def tell(self, fault: str) -> None:
        """Write why the record is not in MLflow yet, for the next command to tell; empty if a person knows."""
        if not self.has_fault:
            with contextlib.suppress(OSError):
                (self.folder / FAULT).write_text(fault, encoding="utf-8")

    def remove(self) -> None:
        """Remove the record: MLflow has it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the state has other records
            self.folder.parent.rmdir()

    def set_aside(self) -> Path:
        """Move a record that cannot be read out of the way; return its new place."""
        place = private_folder() / "bad_records" / f"{self.folder.parent.name}-{self.folder.name}"
        place.parent.mkdir(exist_ok=True)
        self.folder.rename(place)
        return place


def records_folder() -> Path:
    """Return the folder of all records of this clone."""
    return private_folder() / "records"


def new_record(state: str, folder: Path | None = None) -> Record:
    """Return an empty record of an attempt that begins now, in a folder of its own; names sort by time."""
    folder = folder or records_folder() / state[:32] / f"{time.time_ns()}-{os.getpid()}"
    (folder / ARTIFACTS).mkdir(parents=True)
    (folder / ATTEMPT).mkdir()
    return Record(folder)


def all_records() -> Iterator[Record]:
    """Yield the records that MLflow does not have whole, the oldest first; remove those that a kill left unbegun."""
    folders = (path for path in records_folder().glob("*/*") if path.is_dir())
    for record in map(Record, sorted(folders, key=lambda path: path.name)):
        if (record.folder / RUN).exists() or psutil.pid_exists(int(record.folder.name.rpartition("-")[2])):
            yield record
        else:
            record.remove()


def shipping_lock(state: str) -> FileLock:
    """Return the lock of whoever ships the records of a state, not acquired."""
    return FileLock(private_folder() / "locks" / f"ship-{state[:32]}.lock")


def shipper_lock() -> FileLock:
    """Return the lock of the process that ships the records for a store, not acquired."""
    name = hashlib.sha256(own_store().encode()).hexdigest()[:8]
    return FileLock(private_folder() / "locks" / f"shipper-{name}.lock")


def own_store() -> str:
    """Return the store's address as records have it; empty for the database in the root."""
    uri = store_uri()
    return "" if uri == f"{SQLITE}{root() / 'mlflow.db'}" else uri


def store_identity() -> tuple[int, int] | None:
    """Return what tells a database from another one in its place; None if there is none, or for a server."""
    with contextlib.suppress(OSError):
        if (uri := store_uri()).startswith(SQLITE):
            status = database_path(uri).stat()
            return status.st_dev, status.st_ino
    return None


def leave_notice(text: str) -> None:
    """Keep what a process without a terminal has to say, for the next command to tell."""
    with contextlib.suppress(OSError), atomic_file(private_folder() / "notices" / f"{time.time_ns()}.txt") as temporary:
        temporary.write_text(text, encoding="utf-8")


def take_notices() -> list[str]:
    """Return the notices that were left, and why records are not in MLflow yet, each once."""
    notices = []
    for path in (*sorted((private_folder() / "notices").glob("*.txt")), *sorted(records_folder().glob(f"*/*/{FAULT}"))):
        with contextlib.suppress(OSError):
            if notice := path.read_text(encoding="utf-8"):  # else it was told, or is being written
                notices.append(notice)
                path.unlink() if path.suffix else path.write_text("")
    return notices


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
