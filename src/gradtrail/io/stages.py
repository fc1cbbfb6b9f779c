"""What every stage script does around its work: check the ground, read params, write outs, report faults."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gradtrail.io.digests import digest
from gradtrail.io.errors import UserError
from gradtrail.io.files import write_json, writing_outs
from gradtrail.io.params import load_section, read_yaml
from gradtrail.io.runtime import RuntimeConfig
from gradtrail.io.states import Entry, StageSpec, live_entry, locked_entry, makers, read_pipeline, state_key
from gradtrail.io.versions import PATH as VERSIONS
from gradtrail.io.versions import require_recorded_versions
from gradtrail.io.workspace import require_own_code, working_folder

Section = TypeVar("Section")


@dataclass(frozen=True)
class Stage:
    """A stage of `dvc.yaml`, in the working folder.

    Attributes:
        name: also of its script, its params section and its metrics file.
        from_lock: whether it is the stage as `dvc.lock` has it, rather than the one that is about to run.
    """

    name: str
    from_lock: bool = False

    @cached_property
    def folder(self) -> Path:
        """The folder that deps and outs are relative to."""
        return working_folder()

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        """All stages."""
        return read_pipeline()

    @property
    def spec(self) -> StageSpec:
        """What `dvc.yaml` says of this one."""
        return self.pipeline[self.name]

    def params(self, into: type[Section], section: str | None = None) -> Section:
        """Load a section of `params.yaml`; by default the one of this stage's name."""
        return load_section(section or self.name, into)

    @cached_property
    def runtime(self) -> RuntimeConfig:
        """What cannot change an out."""
        return load_section("runtime", RuntimeConfig)

    def entry(self, name: str) -> Entry:
        """Return what determines the outs of a stage.

        Of the stage that is about to run, as the files are now. Of another, as `dvc.lock` has it where its outs are
        still those of the lock: what made them counts, not what the code has become since. Without a lock, as the
        files are now.
        """
        if name not in self._entries:
            locked = self._locked_entry(name)
            self._entries[name] = locked or live_entry(self.pipeline[name], self.folder)
        return self._entries[name]

    def state_of(self, name: str) -> str:
        """Return the key of a stage's state, made or about to be made."""
        return state_key(name, self.pipeline, self.entry)

    @property
    def state(self) -> str:
        """Key of the state that this stage is about to make."""
        return self.state_of(self.name)

    @property
    def lineage(self) -> list[str]:
        """This stage and all before it, in the pipeline's order."""
        found, waiting = set[str](), [self.name]
        while waiting:
            found.add(name := waiting.pop())
            waiting += makers(name, self.pipeline)
        return [name for name in self.pipeline if name in found]

    def describe_lineage(self) -> dict[str, dict[str, Any]]:
        """Return, for this stage and each before it, its state and all that determines it: command, params, deps."""
        return {name: {"state": self.state_of(name), **dataclasses.asdict(self.entry(name))} for name in self.lineage}

    @property
    def is_locked(self) -> bool:
        """Whether `dvc.lock` has this stage."""
        return self.name in self._lock

    def has_outs_of_lock(self, name: str) -> bool:
        """Whether the outs in the working folder are those that `dvc.lock` names for a stage."""
        outs = {out["path"]: out["md5"] for out in self._lock[name].get("outs", ())}
        return all((self.folder / out).exists() and digest(self.folder / out) == md5 for out, md5 in outs.items())

    def _locked_entry(self, name: str) -> Entry | None:
        if name not in self._lock:
            return None
        trusted = self.from_lock or (name != self.name and self.has_outs_of_lock(name))
        return locked_entry(self._lock[name]) if trusted else None

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        return {}

    @cached_property
    def _lock(self) -> dict[str, Any]:
        path = self.folder / "dvc.lock"
        return read_yaml(path).get("stages", {}) if path.is_file() else {}

    @contextlib.contextmanager
    def writing_outs(self) -> Iterator[Path]:
        """Yield a folder to write all outs to; they come to their places together, when all are written."""
        with writing_outs(self.spec.outs, self.folder, self.name) as new:
            yield new

    def write_metrics(self, new: Path, metrics: Mapping[str, Any]) -> None:
        """Write the metrics file among the new outs: flat keys, numbers rounded to 9 digits."""
        write_json(new / "metrics" / f"{self.name}.json", {key: _plain(value) for key, value in metrics.items()})

    def read_metrics(self) -> dict[str, Any]:
        """Read the metrics file in its place."""
        metrics: dict[str, Any] = json.loads((self.folder / "metrics" / f"{self.name}.json").read_text())
        return metrics


def locked_stages() -> list[Stage]:
    """Return the stages that `dvc.lock` has, as it has them, in the pipeline's order."""
    pipeline = Stage("").pipeline
    return [stage for name in pipeline if (stage := Stage(name, from_lock=True)).is_locked]


def run_stage(main: Callable[[Stage], None], name: str) -> None:
    """Run a stage script and turn what went wrong into an exit status.

    0: done. 1: a fault of the program, with traceback. 2: a fault that a person can mend, in one line. 130: stopped by
    Ctrl-C.
    """
    try:
        require_own_code()
        stage = Stage(name)
        require_recorded_versions(stage.spec.params.get(str(VERSIONS), ()))
        main(stage)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: stopped; the outs of before stand", file=sys.stderr)
        sys.exit(130)


def _plain(value: Any) -> Any:
    """Turn a NumPy or JAX scalar into a number that reads well."""
    if isinstance(value, str | bool | int):
        return value
    if str(getattr(value, "dtype", "")).startswith("int"):
        return int(value)
    return float(f"{float(value):.9g}")
