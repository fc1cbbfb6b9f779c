"""Where experiments of the working folder's commit can be made elsewhere: what must be shared, and is it?

Everything is looked at before anything is sent: uncommitted changes, a commit that the git remote lacks, a DVC remote
that is not in the commit, a tracking server that no other machine can reach, passwords in addresses.
"""

import configparser
from dataclasses import dataclass
from pathlib import Path

from gradtrail.cluster.task.shell import CommandError
from gradtrail.cluster.task.shell import git as strict_git
from gradtrail.stages.common.dvc_cache import cache_folder, require_copies
from gradtrail.stages.common.pipeline_file import read_pipeline
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, git, head_commit
from gradtrail.support.paths import SQLITE, root, store_uri
from gradtrail.support.secrets import has_password

_ALSO = ("dvc.yaml", "dvc.lock", ".dvc/config", "src", "pipeline")
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Places:
    """What a commit's experiments are made from and go to.

    Attributes:
        commit: hash of the commit.
        remote: name of the git remote; empty where it is this repository itself.
        git_url: its address.
        tracking_uri: MLflow's store.
        cache: DVC's cache, where all nodes share it; None where there is a DVC remote.
    """

    commit: str
    remote: str
    git_url: str
    tracking_uri: str
    cache: str | None


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
        UserError: one line that says what is missing, and what to do.
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
    """Return the commit that is checked out; raise UserError where the working folder differs in what stages read."""
    commit = head_commit()
    if not commit:
        raise UserError("a cluster runs commits: no git repository with a commit is here")
    pipeline = read_pipeline().values()
    made = {out for spec in pipeline for out in spec.outs}
    read = {path for spec in pipeline for path in (*spec.deps, *spec.params)} - made
    paths = sorted({path for path in read if not any(path.startswith(f"{out}/") for out in made)} | {*_ALSO})
    status = git("status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *paths)
    changed = [line.split(maxsplit=1)[1] for line in status.splitlines()]
    if changed:
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        raise UserError(
            f"uncommitted changes in {', '.join(changed[:_MOST_NAMED])}{more}: "
            "a cluster runs commits; commit them, or `git stash` them"
        )
    return commit


def _remote() -> str:
    """Return the git remote: that of the branch, or `origin`, or the only one."""
    branch = git("rev-parse", "--abbrev-ref", "HEAD")
    remotes = git("remote").splitlines()
    named = git("config", f"branch.{branch}.remote") or ("origin" if "origin" in remotes else "")
    if named in remotes:
        return named
    if len(remotes) == 1:
        return remotes[0]
    found = f"it has {', '.join(remotes)}, and the branch follows none" if remotes else "it has none"
    raise UserError(f"a cluster needs a git remote that it can reach: {found}; `git remote add origin URL`")


def _require_dvc_remote(commit: str) -> None:
    content = blobs(commit, [".dvc/config"]).get(".dvc/config", b"")
    config = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        config.read_string(content.decode(errors="replace"))
    except configparser.Error:
        return  # DVC says what is wrong with it
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
