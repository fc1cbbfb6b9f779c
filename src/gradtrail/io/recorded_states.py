"""Which states there are: those that commits, experiments and the working folder record, and those that only ran.

Sync gives each of them its row; `gradtrail gc` removes the rows of all others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradtrail.io.dvc_cache import is_here
from gradtrail.io.identity import Identity
from gradtrail.io.run_cache import run_cache_snapshots
from gradtrail.io.snapshots import Snapshot, committed_snapshots, working_snapshot
from gradtrail.io.states import CHILDREN, entry_key


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What commits, experiments and the working folder have.

    Attributes:
        snapshots: the oldest first, the working folder's last.
        num_unreadable: commits whose pipeline or lock is none.
    """

    snapshots: list[Snapshot]
    num_unreadable: int

    def only_ran(self, is_known: Callable[[str], bool]) -> list[Snapshot]:
        """Return what only the run-cache has, the oldest first, as far as DVC's cache has the files.

        Args:
            is_known: whether an entry, given by its key, needs no snapshot.
        """
        pipelines = [snapshot.pipeline for snapshot in reversed(self.snapshots)]
        return [snapshot for snapshot in run_cache_snapshots(pipelines, is_known) if has_files(last_stage(snapshot))]


def recorded_snapshots() -> Recorded:
    """Return all that is recorded.

    Raises:
        UserError: the working folder's pipeline or lock is none.
    """
    committed, num_unreadable = committed_snapshots()
    working = working_snapshot()
    return Recorded(snapshots=[*committed, *([working] if working else [])], num_unreadable=num_unreadable)


def sound_stages(snapshot: Snapshot) -> Iterator[Identity]:
    """Yield the stages of a snapshot whose states can be told, and whose training is one, in the pipeline's order."""
    stages = (Identity(name, from_lock=True, snapshot=snapshot) for name in snapshot.pipeline)
    sound = [stage for stage in stages if stage.is_sound]
    has_training = any(stage.name == "train" for stage in sound)
    yield from (stage for stage in sound if has_training or stage.name not in CHILDREN)


def last_stage(snapshot: Snapshot) -> Identity:
    """Return the last stage that a snapshot's lock has: of one from the run-cache, the one that it is about."""
    return Identity(list(snapshot.lock)[-1], from_lock=True, snapshot=snapshot)


def entry_of(stage: Identity) -> str:
    """Return the key of a stage's entry."""
    return entry_key(stage.name, stage.entry(stage.name))


def has_files(stage: Identity, *, but_metrics: bool = False) -> bool:
    """Whether DVC's cache, or the working folder, has all outs of a stage; if asked, but for its metrics file."""
    passed_over = f"metrics/{stage.name}.json" if but_metrics else None
    return all(is_here(out, md5) for out, md5 in stage.out_digests().items() if out != passed_over)
