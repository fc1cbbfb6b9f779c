"""The commit of experiments, and where code, files and runs are; checks that other machines can reach them.

All checks come before anything is sent: uncommitted changes, a commit that the git remote lacks, a DVC remote that is
not in the commit, a tracking server that other machines cannot reach, passwords in addresses.
"""

import configparser
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gradtrail.stages.common.dvc_cache import cache_folder, require_copies
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, git, head_commit, strict_git
from gradtrail.support.paths import SQLITE, root, store_uri
from gradtrail.support.secrets import has_password
from gradtrail.support.shell import CommandError

_ALWAYS_READ = ("dvc.yaml", "dvc.lock", ".dvc/config", "src", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Places:
    """The commit of the experiments, and the addresses of code, files and runs."""

    commit: str  # hash of the commit
    git_url: str  # address of the repository that has the commit, and gets the experiments' refs
    tracking_uri: str  # address of MLflow's store
    cache: str | None  # DVC's cache if all workers share it; None if files go through the DVC remote


def local_places() -> Places:
    """Return the places for experiments on this machine: this repository, its cache and its store."""
    require_copies()
    return Places(
        commit=_clean_commit(),
        git_url=str(Path(git("rev-parse", "--git-common-dir")).resolve()),
        tracking_uri=store_uri(),
        cache=str(cache_folder().resolve()),
    )


def shared_places() -> Places:
    """Return the places that other machines can reach.

    Raises:
        UserError: A requirement is missing; the message names it and the remedy.
    """
    commit, remote = _clean_commit(), _remote()
    url = git("remote", "get-url", remote)
    if has_password(url):
        raise UserError(
            f"git remote {remote}: its address holds a password; keep it in a credential helper of each machine"
        )
    if store_uri().startswith(SQLITE):
        raise UserError(
            "MLFLOW_TRACKING_URI: must name a tracking server that the cluster reaches, such as http://HOST:5000"
        )
    _require_dvc_remote(commit)
    try:
        strict_git("fetch", "--quiet", remote, folder=root())
    except CommandError as error:
        raise UserError(f"git remote {remote}: {error}") from None
    if not git("for-each-ref", "--contains", commit, "--count=1", f"refs/remotes/{remote}", "refs/tags"):
        raise UserError(f"git remote {remote} has no commit {commit[:12]}: `git push {remote}` first")
    return Places(commit=commit, git_url=url, tracking_uri=store_uri(), cache=None)


def read_refs(url: str, refs: Collection[str]) -> dict[str, str]:
    """Return the values of those refs that exist in the repository at an address."""
    lines = strict_git("ls-remote", url, *refs).splitlines() if refs else []
    values = (line.split(maxsplit=1) for line in lines)
    return {ref: value for value, ref in values if ref in refs}


def _clean_commit() -> str:
    """Return the commit that is checked out; raise UserError if the stages' inputs have uncommitted changes."""
    commit = head_commit()
    if not commit:
        raise UserError("a cluster runs commits: this is no git repository with a commit")
    pipeline = read_pipeline().values()
    made = {out for spec in pipeline for out in spec.outs}
    read = {path for spec in pipeline for path in (*spec.deps, *spec.params)} - made
    paths = sorted(read | {*_ALWAYS_READ})
    status = git("status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *paths)
    if changed := [line.split(maxsplit=1)[1] for line in status.splitlines()]:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"uncommitted changes in {changed[0]}{more}: a cluster runs commits; commit them, or `git stash` them"
        )
    return commit


def _remote() -> str:
    """Return the git remote that the branch tracks, or else `origin`."""
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    remote = git("config", f"branch.{branch}.remote") or "origin"
    if remote not in git("remote").splitlines():
        raise UserError(
            f"a cluster needs a git remote that it can reach, and there is no {remote}; `git remote add` it"
        )
    return remote


def _require_dvc_remote(commit: str) -> None:
    content = blobs(commit, [".dvc/config"]).get(".dvc/config", b"")
    config = configparser.ConfigParser(interpolation=None, strict=False)
    config.read_string(content.decode(errors="replace"))
    if not config.get("core", "remote", fallback=""):
        raise UserError(
            ".dvc/config: no default remote in the commit; "
            "`dvc remote add --default storage s3://BUCKET/PATH`, and commit it"
        )
