"""`gradtrail review`: look through suspected label errors in a browser, and join what several people decided."""

import getpass
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from gradtrail.experiments.review import server, suspects
from gradtrail.experiments.review.session import Decisions, Review
from gradtrail.stages.artifacts.splits import read_splits
from gradtrail.stages.common.dataset import DatasetInfo, read_info
from gradtrail.stages.datasets.catalog import class_names
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
        path: of the file of corrections.
        reviewer: who decides; by default git's user, or else the system's.
        split: to look at; None for all.
        limit: number of labels at most.
        port: on loopback.

    Raises:
        UserError: one line.
    """
    with server.open_port(port) as listening:
        server.serve(prepare(path, reviewer=reviewer, split=split, limit=limit), listening)


def prepare(path: Path, *, reviewer: str | None, split: str | None, limit: int) -> Review:
    """Return a review of the labels that the audit suspects most; see `review`."""
    if not suspects.PATH.is_file():
        raise UserError(f"{suspects.PATH}: no such file; run `make audit` first, which finds the labels to look at")
    info = read_info(_DATA)
    splits = read_splits(_DATA, info)
    table = suspects.read_suspects(suspects.PATH, info.num_classes)
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
    """Add files of corrections to one; an example that several decide alike stands there once.

    Args:
        paths: of the files.
        into: path of the file that they are added to, which keeps what it has; made where there is none.

    Raises:
        UserError: a file is damaged, or two disagree: each such example is a line on stdout, and nothing is written.
    """
    with FileLock(_lock()):
        files = [into, *paths] if into.exists() else paths
        rows: list[Correction] = [*dict.fromkeys(row for path in files for row in read_corrections(path))]
        if differing := disagreements(rows):
            print("\n".join(differing))
            raise UserError(f"{len(differing)} examples are decided differently; none is applied, {into} is as it was")
        joined = {row.example: row for row in reversed(rows)}
        write_corrections(into, joined.values())
    print(f"{into}: {len(joined)} decisions, {sum(row.changes for row in joined.values())} of them corrections")


def _lock() -> Path:
    """Return the path of the lock that all who write corrections share."""
    return private_folder() / "corrections.lock"


def _class_names(info: DatasetInfo) -> list[str]:
    """Return what the page calls each class: its number, with its name where the data set has names."""
    numbered = enumerate(class_names(info.name, info.num_classes))
    return [name if name == str(label) else f"{label} {name}" for label, name in numbered]
