"""The clean checkouts of a node: one per commit and experiment that runs at the same time.

A node's folder has, per repository, a bare clone, a DVC cache that all checkouts share, and the checkouts, which borrow
the clone's objects. One process at a time uses a checkout; after a killed process it is cleaned and reused.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from gradtrail.support.errors import UserError
from gradtrail.support.git import CommandError, strict_git

FOLDER = "GRADTRAIL_CLUSTER_DIR"  # variable with the folder of a node
_MOST_CHECKOUTS = 1000  # largest number per commit and node


@dataclass(frozen=True)
class NodeFolder:
    """The folder of a repository on a node."""

    path: Path
    url: str  # address of the repository

    @property
    def clone(self) -> Path:
        """The bare clone."""
        return self.path / "clone.git"

    @contextlib.contextmanager
    def checkout(self, commit: str, cache: Path | None) -> Iterator[Path]:
        """Yield a clean checkout of a commit that no other process uses while the block runs.

        Args:
            commit: Hash of the commit.
            cache: DVC cache; None for the node's cache.

        Raises:
            UserError: The repository cannot be reached, or lacks the commit.
        """
        self.require(commit)
        commits = self.path / "checkouts" / commit[:16]
        commits.mkdir(parents=True, exist_ok=True)
        with _first_free(commits) as folder:
            _prepare(folder, self.clone, commit)
            strict_git("config", "remote.origin.url", self.url, folder=folder)
            _configure(folder, cache or self.path / "cache")
            yield folder

    def require(self, commit: str) -> None:
        """Fetch a commit into the clone, unless it has it.

        Raises:
            UserError: The repository cannot be reached, or lacks the commit.
        """
        with self.lock("clone"):
            if not (self.clone / "HEAD").is_file():
                temporary = self.path / "clone.new"
                shutil.rmtree(temporary, ignore_errors=True)
                strict_git("clone", "--quiet", "--bare", self.url, str(temporary))
                temporary.rename(self.clone)
            if not _has(self.clone, commit):
                refs = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
                strict_git("fetch", "--quiet", self.url, *refs, folder=self.clone)
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
    """Yield the first of the folders `0`, `1`, … that no process uses."""
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
    """Make a clean checkout: the tracked files of the commit, and no others except ignored ones."""
    if not (folder / ".git" / "HEAD").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        strict_git("clone", "--quiet", "--shared", "--no-checkout", str(clone), str(folder))
    for name in ("index.lock", "HEAD.lock"):  # of a git that was killed
        (folder / ".git" / name).unlink(missing_ok=True)
    shutil.rmtree(folder / ".dvc" / "tmp" / "exps", ignore_errors=True)  # copies of killed experiments
    strict_git("checkout", "--quiet", "--force", "--detach", commit, folder=folder)
    strict_git("clean", "--quiet", "--force", "-d", folder=folder)
    for ref in strict_git("for-each-ref", "--format=%(refname)", "refs/exps", folder=folder).splitlines():
        strict_git("update-ref", "-d", ref, folder=folder)


def _configure(folder: Path, cache: Path) -> None:
    """Set DVC's cache, and a name for commits of experiments if git has none."""
    config = f"[core]\n    analytics = false\n    check_update = false\n[cache]\n    dir = {cache}\n"
    (folder / ".dvc" / "config.local").write_text(config, encoding="utf-8")
    for key, value in {"user.name": "gradtrail", "user.email": "gradtrail@localhost"}.items():
        try:
            strict_git("config", key, folder=folder)
        except CommandError:
            strict_git("config", key, value, folder=folder)


def _has(clone: Path, commit: str) -> bool:
    try:
        strict_git("cat-file", "-e", f"{commit}^{{commit}}", folder=clone)
    except CommandError:
        return False
    return True
