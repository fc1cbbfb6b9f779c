"""`gradtrail review`: review suspected label errors in a browser, and merge the decisions of several people."""

import getpass
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from gradtrail.experiments.review import server, suspects
from gradtrail.experiments.review.session import Decisions, Review
from gradtrail.stages.artifacts.data_files import DatasetInfo, read_info, read_splits
from gradtrail.stages.datasets import class_names
from gradtrail.stages.preprocess.corrections import (
    PATH,
    Correction,
    check_text,
    disagreements,
    read_corrections,
    require_fit,
    write_corrections,
)
from gradtrail.support.errors import UserError
from gradtrail.support.git import git
from gradtrail.support.paths import private_folder

_DATA = Path("data/processed")
_NUM_NEIGHBOURS = 10


def review(path: Path, *, reviewer: str | None, split: str | None, limit: int, port: int) -> None:
    """Serve the page for reviewing labels until Ctrl-C or SIGTERM.

    Args:
        path: File of corrections.
        reviewer: Name to record with each decision; by default git's user, or else the system's.
        split: Split to review; None for all.
        limit: Maximum number of labels.
        port: Port on loopback.

    Raises:
        UserError: The audit, the data or the file of corrections is missing or invalid, or the port is in use.
    """
    with server.open_port(port) as listening:
        server.serve(prepare(path, reviewer=reviewer, split=split, limit=limit), listening)


def prepare(path: Path, *, reviewer: str | None, split: str | None, limit: int) -> Review:
    """Return a review of the labels that the audit suspects most; see `review`."""
    table = suspects.read_suspects(suspects.PATH)
    info = read_info(_DATA)
    splits = read_splits(_DATA)
    decisions = Decisions(path, _lock())
    require_fit(list(decisions.read().values()), splits, info.num_classes, path)
    is_test = (table["split"] == "test").tolist()
    return Review(
        suspects=suspects.choose_suspects(
            table[table["split"] == split] if split else table, splits, limit=limit, num_neighbours=_NUM_NEIGHBOURS
        ),
        train=splits["train"],
        decisions=decisions,
        probabilities=dict(
            zip(zip(is_test, table["example_id"].tolist(), strict=True), table["probability_wrong"], strict=True)
        ),
        class_names=_class_names(info),
        title=info.label,
        reviewer=check_text("--reviewer", reviewer or git("config", "user.name") or getpass.getuser()),
        now=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def merge(paths: Sequence[Path], into: Path = PATH) -> None:
    """Add files of corrections to one file; equal decisions about an example are written once.

    Args:
        paths: Files to add.
        into: File that they are added to, which keeps its decisions; created if it does not exist.

    Raises:
        UserError: A file is damaged, or two disagree: each such example is printed, and nothing is written.
    """
    with FileLock(_lock()):
        files = [into, *paths] if into.exists() else paths
        rows: list[Correction] = [*dict.fromkeys(row for path in files for row in read_corrections(path))]
        if differing := disagreements(rows):
            print("\n".join(differing))
            raise UserError(f"{len(differing)} examples are decided differently; {into} was not changed")
        merged = {row.example: row for row in reversed(rows)}
        write_corrections(into, merged.values())
    print(f"{into}: {len(merged)} decisions, {sum(row.changes for row in merged.values())} of them corrections")


def _lock() -> Path:
    """Return the lock that all writers of corrections share."""
    return private_folder() / "corrections.lock"


def _class_names(info: DatasetInfo) -> list[str]:
    """Return the label of each class on the page: its number, and its name if the data set has names."""
    numbered = enumerate(class_names(info.name, info.num_classes))
    return [name if name == str(label) else f"{label} {name}" for label, name in numbered]
