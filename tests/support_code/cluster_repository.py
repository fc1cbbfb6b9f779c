"""A bare git repository with one commit that several clones share, a stand-in for DVC in it, and a request of a job."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from projects import ROOT

from gradtrail.cluster.request import Places, Request, own_versions

# An experiment is a commit with a ref. The journal gets a line for each execution: processes and arguments. A stage is
# a process of its own. MLflow, which takes seconds to import, is left out.
_DVC = """
import os, subprocess, sys

def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()

def main(words):
    sys.modules["__main__"]._log_runs = lambda *_: None
    stage = subprocess.Popen(["sleep", os.environ["STAGE_SECONDS"]])
    with open(os.environ["JOURNAL"], "a") as journal:
        journal.write(f"{os.getpid()} {stage.pid} {' '.join(words)}\\n")
    if stage.wait():
        print("train: params.yaml: train.seed: too high for", os.environ["SOME_PASSWORD"])
        print("ERROR: failed to reproduce 'train'", file=sys.stderr)
        return 255
    name, head = words[words.index("--name") + 1], git("rev-parse", "HEAD")
    made = git("commit-tree", "HEAD^{tree}", "-p", "HEAD", "-m", name)
    git("update-ref", f"refs/exps/{head[:2]}/{head[2:]}/{name}", made)
    return 0
"""
_FILES = {
    "file": "content",
    ".dvc/.gitignore": "/config.local\n/tmp\n",
    ".dvc/config": "[core]\n    remote = storage\n",
    ".gitignore": "/.gradtrail\n__pycache__\n",
    "dvc.yaml": "stages:\n  train:\n    cmd: 'true'\n    deps: [src/code]\n    params: [train]\n    outs: [models]\n",
    "dvc.lock": "schema: '2.0'\nstages: {}\n",
    "params.yaml": "train: 1\n",
    "src/code/a.py": "A = 1\n",
    "src/dvc/__init__.py": "",
    "src/dvc/cli.py": _DVC,
}


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

    def refs(self) -> dict[str, str]:
        """Return the refs of experiments in the bare repository, ref → commit."""
        lines = run_git(self.bare, "for-each-ref", "--format=%(refname) %(objectname)", "refs/exps").splitlines()
        return dict(line.split() for line in lines)

    def request(self, cache: Path) -> Request:
        """Return a request without experiments, of the present commit."""
        places = Places(commit=self.commit, git_url=self.url, tracking_uri="sqlite:///no.db", cache=str(cache))
        return Request(places=places, cpus=1.0, gpus=0.0, versions=own_versions(), experiments=())


def make_shared_repository(folder: Path) -> SharedRepository:
    shared = SharedRepository(folder / "shared.git", folder / "clone")
    folder.mkdir(exist_ok=True)
    run_git(folder, "init", "-q", "--bare", str(shared.bare))
    run_git(folder, "init", "-q", str(shared.clone))
    for name, content in _FILES.items():
        (shared.clone / name).parent.mkdir(parents=True, exist_ok=True)
        (shared.clone / name).write_text(content)
    (shared.clone / "src" / "gradtrail").symlink_to(ROOT / "src" / "gradtrail")
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
