"""The clean checkouts of a node: one for each commit and each experiment that runs at the same time.

A node's folder has, for each repository, a bare clone, a DVC cache that all checkouts share, and the checkouts, which
borrow the clone's objects. A checkout is held by one process; one that a killed process left is cleaned and reused.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.cluster.task.shell import CommandError, git
from gradtrail.support.errors import UserError

FOLDER = "GRADTRAIL_CLUSTER_DIR"  # variable that names the folder of a node
_MOST_CHECKOUTS = 1000  # of one commit on one node


@dataclass(frozen=True)
class NodeFolder:
    """What a node keeps of a repository.

    Attributes:
        path: its folder.
        url: the repository's address.
    """

    path: Path
    url: str

    @property
    def clone(self) -> Path:
        """The bare clone."""
        return self.path / "clone.git"

    @contextlib.contextmanager
    def checkout(self, commit: str, cache: Path | None) -> Iterator[Path]:
        """Yield a clean checkout of a commit that no other process uses while the block runs.

        Args:
            commit: its hash.
            cache: the DVC cache; the node's own where it is None.

        Raises:
            UserError: the repository cannot be reached, or lacks the commit; one line.
        """
        self.require(commit)
        commits = self.path / "checkouts" / commit[:16]
        commits.mkdir(parents=True, exist_ok=True)
        with _first_free(commits) as folder:
            _prepare(folder, self.clone, commit)
            git("config", "remote.origin.url", self.url, folder=folder)
            _configure(folder, cache or self.path / "cache")
            yield folder

    def require(self, commit: str) -> None:
        """Get a commit into the clone, unless it is there.

        Raises:
            UserError: the repository cannot be reached, or lacks the commit; one line.
        """
        with self.lock("clone"):
            if not (self.clone / "HEAD").is_file():
                beside = self.path / "clone.new"
                shutil.rmtree(beside, ignore_errors=True)
                git("clone", "--quiet", "--bare", self.url, str(beside))
                beside.rename(self.clone)
            if not _has(self.clone, commit):
                git(
                    "fetch",
                    "--quiet",
                    self.url,
                    "+refs/heads/*:refs/heads/*",
                    "+refs/tags/*:refs/tags/*",
                    folder=self.clone,
                )
            if not _has(self.clone, commit):
                raise UserError(f"{self.url}: has no commit {commit[:12]}: push it with `git push`")

    def lock(self, name: str) -> FileLock:
        """Return a lock among the processes of the node."""
        self.path.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path / f"{name}.lock")


def node_folder(url: str) -> NodeFolder:
    """Return the folder of a repository on this node: below `GRADTRAIL_CLUSTER_DIR`, or in the user's cache."""
    base = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "gradtrail" / "cluster")
    return NodeFolder(base / hashlib.sha256(url.encode()).hexdigest()[:16], url)


@contextlib.contextmanager
def _first_free(folder: Path) -> Iterator[Path]:
    """Yield the first of the folders `0`, `1`, … that no process holds."""
    for number in range(_MOST_CHECKOUTS):
        lock = FileLock(folder / f"{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            yield folder / str(number)
        finally:
            lock.release()
        return
    raise UserError(f"{folder}: {_MOST_CHECKOUTS} checkouts are in use")


def _prepare(folder: Path, clone: Path, commit: str) -> None:
    """Make a clean checkout: the tracked files of the commit, no others but those that git ignores."""
    if not (folder / ".git" / "HEAD").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        git("clone", "--quiet", "--shared", "--no-checkout", str(clone), str(folder))
    for left in ("index.lock", "HEAD.lock"):  # by a git that was killed
        (folder / ".git" / left).unlink(missing_ok=True)
    shutil.rmtree(folder / ".dvc" / "tmp" / "exps", ignore_errors=True)  # copies of experiments that were killed
    git("checkout", "--quiet", "--force", "--detach", commit, folder=folder)
    git("clean", "--quiet", "--force", "-d", folder=folder)
    for ref in git("for-each-ref", "--format=%(refname)", "refs/exps", folder=folder).splitlines():
        git("update-ref", "-d", ref, folder=folder)


def _configure(folder: Path, cache: Path) -> None:
    """Set DVC's cache, and a name for commits of experiments where git has none."""
    config = f"[core]\n    analytics = false\n    check_update = false\n[cache]\n    dir = {cache}\n"
    (folder / ".dvc" / "config.local").write_text(config, encoding="utf-8")
    for key, value in {"user.name": "gradtrail", "user.email": "gradtrail@localhost"}.items():
        try:
            git("config", key, folder=folder)
        except CommandError:
            git("config", key, value, folder=folder)


def _has(clone: Path, commit: str) -> bool:
    try:
        git("cat-file", "-e", f"{commit}^{{commit}}", folder=clone)
    except CommandError:
        return False
    return True
