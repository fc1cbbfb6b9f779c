"""The inputs of a stage at its start: its results are recorded only if the inputs are the same at its end.

DVC hashes params and deps after the command has ended. Without this check, the results of a stage whose params, code or
data were edited meanwhile would be recorded, and later served from the run-cache, under inputs that never made them.
"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradtrail.stages.common.digests import Stamps, changed_files, stamps_of
from gradtrail.stages.common.overrides import flatten
from gradtrail.stages.common.pipeline_file import Entry, StageSpec, is_code, live_entry, read_pipelines
from gradtrail.stages.common.versions import PATH as VERSIONS
from gradtrail.stages.common.versions import require_recorded_versions
from gradtrail.support.errors import UserError
from gradtrail.support.running_time import seconds_running

_CLOCK_SECONDS = 0.02  # largest difference of the clocks: a tick of 10 ms for processes, of 4 ms for files


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
        UserError: a dep or a param is missing; or code changed after this process started, which may have imported
            either version.
    """
    stamps = _read_stamps(spec)
    if newest := _changed_within(seconds_running() - _CLOCK_SECONDS, stamps):
        raise UserError(f"{newest} changed while {name} was starting; run it again")
    entry = live_entry(spec, Path(), is_partial=True)
    if missing := [dep for dep in spec.deps if dep not in entry.deps]:
        raise UserError(f"{missing[0]}: no such file or folder, which {name} reads; `dvc repro {name}` makes it")
    return Inputs(name=name, spec=spec, entry=entry, stamps=stamps)


def _changed_within(seconds: float, stamps: Stamps) -> Path | None:
    """Return a code file that changed in the last `seconds`, by the clock of the file system; None if none did."""
    with tempfile.TemporaryFile(dir=Path()) as file:
        now = os.fstat(file.fileno()).st_ctime
    code = {path: stamp for path, stamp in stamps.items() if is_code(path.as_posix())}
    newest = max(code, key=lambda path: code[path][0], default=None)
    return newest if newest and now - code[newest][0] / 1e9 < seconds else None


def _read_stamps(spec: StageSpec) -> Stamps:
    return stamps_of(map(Path, ("dvc.yaml", *spec.params, *spec.deps)))


def _changes(before: Entry, after: Entry, files: list[str]) -> Iterator[str]:
    """Yield each change of a param or a dep; for a folder, the first changed file in it."""
    for file, values in before.params.items():
        old, new = flatten(values), flatten(after.params[file])
        for key in sorted({*old, *new}):
            was, is_now = (repr(values[key]) if key in values else "nothing" for values in (old, new))
            if was != is_now:
                yield f"{file}: {key} changed from {was} to {is_now}"
    for dep, md5 in before.deps.items():
        if after.deps[dep] != md5:
            yield f"{next((file for file in files if file.startswith(dep)), dep)} changed"
