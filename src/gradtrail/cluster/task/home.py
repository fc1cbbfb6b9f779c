"""Brings home what a cluster made: refs of experiments, and the listings of folders in DVC's cache.

Not the files themselves, which may be many: `dvc exp pull` gets those. The listings say which file in a folder has
which digest, without which a run cannot be found by what it read.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from gradtrail.cluster.task.make import experiment_ref
from gradtrail.cluster.task.places import Places
from gradtrail.cluster.task.refs import SharedRefs
from gradtrail.cluster.task.shell import git
from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.params import parse_yaml
from gradtrail.stages.common.pipeline_file import parse_lock
from gradtrail.support.errors import UserError, is_store_fault, one_line, printable
from gradtrail.support.secrets import redacted


def fetch_experiments(places: Places, names: Iterable[str]) -> None:
    """Fetch the refs and the listings of those of the experiments that were made; that this fails is a warning."""
    refs = [experiment_ref(places.commit, name) for name in names]
    if not places.remote or not refs:
        return
    try:
        made = SharedRefs(places.git_url, Path()).read(refs)
        if made:
            git("fetch", "--quiet", "--no-tags", places.remote, *(f"+{ref}:{ref}" for ref in made))
            _fetch_listings(made.values())
    except Exception as error:
        if not _is_of_a_remote(error):
            raise
        said = printable(redacted(one_line(error)))[:300]
        print(f"warning: not all results are fetched yet ({said}); run the same command again", file=sys.stderr)


def _is_of_a_remote(error: Exception) -> bool:
    """Whether git, DVC, its libraries (`dvc_data`, `dvc_s3`, …), those of stores, or the system raise it."""
    is_of_dvc = any(kind.__module__.partition(".")[0].partition("_")[0] == "dvc" for kind in type(error).__mro__)
    return isinstance(error, UserError) or is_of_dvc or is_store_fault(error)


def _fetch_listings(commits: Iterable[str]) -> None:
    locks = (parse_lock(parse_yaml(git("show", f"{one}:dvc.lock").encode(), "dvc.lock"), "dvc.lock") for one in commits)
    outs = (out for lock in locks for section in lock.values() for out in section.get("outs", ()))
    wanted = {out["md5"] for out in outs if out["md5"].endswith(".dir")}
    missing = [md5 for md5 in wanted if listing(md5) is None]
    if missing:
        from dvc.repo import Repo  # late: importing it takes half a second
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.transfer import transfer

        with Repo() as repo:
            objects = {HashInfo("md5", md5) for md5 in missing}
            transfer(repo.cloud.get_remote_odb(), repo.cache.local, objects, shallow=True)
