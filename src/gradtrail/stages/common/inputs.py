"""What a stage reads, as it was when the stage started: its results are recorded only if that still holds at its end.

DVC hashes params and deps after the command has ended. Without this check, the results of a stage whose params, code or
data were edited meanwhile would be recorded, and later served from the run-cache, under inputs that never made them.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.common.pipeline_file import Entry, StageSpec, is_code, live_entry, read_pipelines
from gradtrail.stages.common.versions import PATH as VERSIONS
from gradtrail.stages.common.versions import require_recorded_versions
from gradtrail.support.errors import UserError
from gradtrail.support.running_time import seconds_running

Stamps = dict[Path, tuple[int, ...]]
_CLOCK_SECONDS = 0.03  # by which the clocks of files and of processes differ; no code is imported so early


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a stage at one moment."""

    name: str
    spec: StageSpec
    entry: Entry
    stamps: Stamps  # of all files that the stage reads

    def have_changed(self) -> bool:
        """Whether the inputs are no longer those of the start."""
        return self._describe_change() != ""

    def require_unchanged(self) -> None:
        """Raise UserError, in one line that names what changed, unless the inputs are those of the start."""
        if change := self._describe_change():
            raise UserError(
                f"{change} while {self.name} ran; its results are not recorded, as DVC would take them for those of "
                "the new inputs; `dvc repro` runs it again, and resumes a training once the change is undone"
            )

    def _describe_change(self) -> str:
        """Return the first change since the start; empty if there is none."""
        try:
            require_recorded_versions(self.spec.params.get(str(VERSIONS), ()))
            if (stamps := _read_stamps(self.spec)) == self.stamps:
                return ""
            if read_pipelines(Path()).get(self.name) != self.spec:
                return f"dvc.yaml: stage {self.name} changed"
            now = live_entry(self.spec, Path())
        except FileNotFoundError as error:
            return f"{error.filename} was removed"
        except UserError as error:
            return f"a file that it reads changed ({error})"
        return next(_changes(self.entry, now, changed_files(self.stamps, stamps)), "")


def read_inputs(name: str, spec: StageSpec) -> Inputs:
    """Read the inputs of a stage in the working folder.

    Raises:
        UserError: a dep is missing; a params file cannot be read or lacks a key; or code changed after this process
            started, which may have imported either version.
    """
    stamps = _read_stamps(spec)
    if newest := _changed_within(seconds_running() - _CLOCK_SECONDS, stamps):
        raise UserError(f"{newest} changed while {name} was starting; run it again")
    entry = live_entry(spec, Path(), is_partial=True)
    if missing := [dep for dep in spec.deps if dep not in entry.deps]:
        raise UserError(f"{missing[0]}: no such file or folder, which {name} reads; `dvc repro {name}` makes it")
    return Inputs(name=name, spec=spec, entry=entry, stamps=stamps)


def _changed_within(seconds: float, stamps: Stamps) -> Path | None:
    """Return a file of code that changed within so many seconds before now, by the clock of the file system."""
    with tempfile.TemporaryFile(dir=Path()) as file:
        now = os.fstat(file.fileno()).st_ctime
    code = {path: stamp for path, stamp in stamps.items() if is_code(path.as_posix())}
    newest = max(code, key=lambda path: code[path][0], default=None)
    return newest if newest and now - code[newest][0] / 1e9 < seconds else None


def _read_stamps(spec: StageSpec) -> Stamps:
    return stamps_of(Path(name) for name in ("dvc.yaml", *spec.params, *spec.deps))


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return what changes whenever the content of a file does, for files and those in folders; not for missing ones."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if not file.is_dir()]
    stamps: Stamps = {}
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # an editor's temporary file may be gone by now
            if "__pycache__" not in path.parts:
                stat = path.stat()
                stamps[path] = (stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return stamps


def changed_files(before: Stamps, after: Stamps) -> list[str]:
    """Return the files whose stamps differ, or that only one of the two has."""
    return sorted(path.as_posix() for path in {*before, *after} if before.get(path) != after.get(path))


def _changes(before: Entry, after: Entry, files: list[str]) -> Iterator[str]:
    """Yield each change of a param or a dep; for a folder, the first changed file in it."""
    for file, values in before.params.items():
        old, new = flatten(values), flatten(after.params[file])
        for key in sorted({*old, *new}):
            if (was := _shown(old, key)) != (is_now := _shown(new, key)):
                yield f"{file}: {key} changed from {was} to {is_now}"
    for dep, md5 in before.deps.items():
        if after.deps[dep] != md5:
            yield f"{next((file for file in files if file.startswith(dep)), dep)} changed"


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"
