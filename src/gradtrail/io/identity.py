"""Which state a stage makes, or made, and what came before it: from `dvc.yaml`, `dvc.lock` and the files."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradtrail.io.digests import digest
from gradtrail.io.stages import Stage
from gradtrail.io.states import Entry, live_entry, locked_entry, makers, read_lock, read_pipeline, state_key


@dataclass(frozen=True)
class Identity(Stage):
    """A stage, and the identity of its state.

    Attributes:
        from_lock: whether it is the state that `dvc.lock` has, rather than the one that the stage is about to make.
    """

    from_lock: bool = False

    def entry(self, name: str) -> Entry:
        """Return what determines the outs of a stage.

        Of the stage that is about to run, as the files are now. Of a stage before it, as `dvc.lock` has it where its
        outs are still those of the lock: what made them counts, not what code or params have become since. Otherwise
        as the files are now.
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
        is_before = name != self.name and name in self.lineage
        trusted = self.from_lock or (is_before and self.has_outs_of_lock(name))
        return locked_entry(self._lock[name]) if trusted else None

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        return {}

    @cached_property
    def _lock(self) -> dict[str, Any]:
        path = self.folder / "dvc.lock"
        return read_lock(path) if path.is_file() else {}


def locked_identities() -> list[Identity]:
    """Return the stages that `dvc.lock` has, as it has them, in the pipeline's order."""
    return [identity for name in read_pipeline() if (identity := Identity(name, from_lock=True)).is_locked]
