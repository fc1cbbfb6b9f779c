"""Checks that other machines can run experiments of the working folder's commit, and returns the addresses they need.

All checks come before anything is sent: uncommitted changes, a commit that the git remote lacks, a DVC remote that is
not in the commit, a tracking server that other machines cannot reach, passwords in addresses.
"""

import configparser
from dataclasses import dataclass
from pathlib import Path

from gradtrail.stages.common.dvc_cache import cache_folder, require_copies
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.support.errors import UserError, has_password
from gradtrail.support.git import CommandError, blobs, git, head_commit, strict_git
from gradtrail.support.paths import SQLITE, root, store_uri

_ALWAYS_READ = ("dvc.yaml", "dvc.lock", ".dvc/config", "src", "pipeline")
_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Places:
    """The commit of the experiments, and the addresses of code, files and runs."""

    commit: str  # hash of the commit
    remote: str  # name of the git remote; empty if it is this repository itself
    git_url: str  # address of the git remote
    tracking_uri: str  # address of MLflow's store
    cache: str | None  # DVC's cache if all nodes share it; None if they use the DVC remote


def local_places() -> Places:
    """Return the places for experiments on this machine: this repository, its cache and its store."""
    require_copies()
    commit = _clean_commit()
    folder = Path(git("rev-parse", "--git-common-dir")).resolve()
    return Places(
        commit=commit, remote="", git_url=str(folder), tracking_uri=store_uri(), cache=str(cache_folder().resolve())
    )


def shared_places() -> Places:
    """Return the places that other machines can reach.

    Raises:
        UserError: A requirement is missing; the message names it and the remedy.
    """
    commit = _clean_commit()
    remote = _remote()
    url = git("remote", "get-url", remote)
    if has_password(url):
        raise UserError(
            f"git remote {remote}: its address holds a password; keep it in a credential helper of each machine"
        )
    tracking_uri = store_uri()
    if tracking_uri.startswith(SQLITE):
        raise UserError(
            "MLFLOW_TRACKING_URI: must name a tracking server that the cluster reaches, such as http://HOST:5000"
        )
    _require_dvc_remote(commit)
    _require_pushed(commit, remote)
    return Places(commit=commit, remote=remote, git_url=url, tracking_uri=tracking_uri, cache=None)


def _clean_commit() -> str:
    """Return the commit that is checked out; raise UserError if the stages' inputs have uncommitted changes."""
    commit = head_commit()
    if not commit:
        raise UserError("a cluster runs commits: this is no git repository with a commit")
    pipeline = read_pipeline().values()
    made = {out for spec in pipeline for out in spec.outs}
    read = {path for spec in pipeline for path in (*spec.deps, *spec.params)} - made
    paths = sorted({path for path in read if not any(path.startswith(f"{out}/") for out in made)} | {*_ALWAYS_READ})
    status = git("status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *paths)
    changed = [line.split(maxsplit=1)[1] for line in status.splitlines()]
    if changed:
        more = f" and {len(changed) - _MOST_NAMES} more" if len(changed) > _MOST_NAMES else ""
        raise UserError(
            f"uncommitted changes in {', '.join(changed[:_MOST_NAMES])}{more}: "
            "a cluster runs commits; commit them, or `git stash` them"
        )
    return commit


def _remote() -> str:
    """Return the git remote: that of the branch, or `origin`, or the only one."""
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    remotes = git("remote").splitlines()
    configured = git("config", f"branch.{branch}.remote") or ("origin" if "origin" in remotes else "")
    if configured in remotes:
        return configured
    if len(remotes) == 1:
        return remotes[0]
    state = f"it has {', '.join(remotes)}, and the branch tracks none" if remotes else "it has none"
    raise UserError(f"a cluster needs a git remote that it can reach: {state}; `git remote add origin URL`")


def _require_dvc_remote(commit: str) -> None:
    content = blobs(commit, [".dvc/config"]).get(".dvc/config", b"")
    config = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        config.read_string(content.decode(errors="replace"))
    except configparser.Error:
        return  # DVC reports the error
    if not config.get("core", "remote", fallback=""):
        raise UserError(
            ".dvc/config: no default remote in the commit; "
            "`dvc remote add --default storage s3://BUCKET/PATH`, and commit it"
        )


def _require_pushed(commit: str, remote: str) -> None:
    try:
        strict_git("fetch", "--quiet", remote, folder=root())
    except CommandError as error:
        raise UserError(f"git remote {remote}: {error}") from None
    if not git("for-each-ref", "--contains", commit, "--count=1", f"refs/remotes/{remote}", "refs/tags"):
        raise UserError(f"git remote {remote} has no commit {commit[:12]}: `git push {remote}` first")
