"""A bare git repository with one commit that several clones share, and a request of a job."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrail.cluster.request import Request, own_packages, own_python


@dataclass(frozen=True)
class SharedRepository:
    """A bare repository, and a clone that pushed the first commit to it."""

    bare: Path
    clone: Path

    @property
    def url(self) -> str:
        return str(self.bare)

    @property
    def commit(self) -> str:
        return run_git(self.clone, "rev-parse", "HEAD")

    def refs(self, prefix: str = "refs") -> dict[str, str]:
        """Return ref → value, of the bare repository."""
        lines = run_git(self.bare, "for-each-ref", "--format=%(refname) %(objectname)", prefix).splitlines()
        return dict(line.split() for line in lines)


def make_shared_repository(folder: Path) -> SharedRepository:
    shared = SharedRepository(folder / "shared.git", folder / "clone")
    folder.mkdir(exist_ok=True)
    run_git(folder, "init", "-q", "--bare", str(shared.bare))
    run_git(folder, "init", "-q", str(shared.clone))
    (shared.clone / "file").write_text("content")
    (shared.clone / ".dvc").mkdir()
    (shared.clone / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n")
    (shared.clone / ".dvc" / "config").write_text("")
    (shared.clone / "dvc.yaml").write_text("stages:\n  train:\n    cmd: 'true'\n")
    run_git(shared.clone, "add", "-A")
    run_git(shared.clone, "commit", "-qm", "first")
    run_git(shared.clone, "remote", "add", "origin", str(shared.bare))
    run_git(shared.clone, "push", "-q", "origin", "HEAD:main")
    run_git(shared.clone, "fetch", "-q", "origin")
    return shared


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def new_request(**changes: Any) -> Request:
    """Return a request without experiments."""
    values: dict[str, Any] = {
        "git_url": "/srv/x.git",
        "commit": "0" * 40,
        "tracking_uri": "http://127.0.0.1:5000",
        "cache": None,
        "cpus": 1.0,
        "gpus": 0.0,
        "python": own_python(),
        "packages": own_packages(),
        "experiments": (),
    }
    return Request(**values | changes)
