"""Fetches experiment refs, and the listings of folders in DVC's cache, from the remotes of a cluster.

It fetches no files, which may be many: `dvc exp pull` does. A listing maps the files of a folder to their digests;
without it a run cannot be matched by the files that it read.
"""

import sys
from collections.abc import Iterable

from gradtrail.cluster.places import Places
from gradtrail.cluster.refs import committed_lock, experiment_ref, read_refs
from gradtrail.stages.common.dvc_cache import listing
from gradtrail.stages.common.pipeline_file import output_digests
from gradtrail.support.errors import UserError, is_store_fault, one_line, printable, redacted
from gradtrail.support.git import strict_git


def fetch_experiments(places: Places, names: Iterable[str]) -> None:
    """Fetch refs and listings of the experiments that are done; a failure is printed as a warning."""
    refs = [experiment_ref(places.commit, name) for name in names]
    if not places.remote or not refs:
        return
    try:
        made = read_refs(places.git_url, refs)
        if made:
            strict_git("fetch", "--quiet", "--no-tags", places.remote, *(f"+{ref}:{ref}" for ref in made))
            _fetch_listings(made.values())
    except Exception as error:
        if not _is_remote_error(error):
            raise
        message = printable(redacted(one_line(error)))[:300]
        print(f"warning: not all results are fetched yet ({message}); run the same command again", file=sys.stderr)


def _is_remote_error(error: Exception) -> bool:
    """Whether git, DVC, its libraries (`dvc_data`, `dvc_s3`, …), a store's client or the system raised an error."""
    is_from_dvc = any(kind.__module__.partition(".")[0].partition("_")[0] == "dvc" for kind in type(error).__mro__)
    return isinstance(error, UserError) or is_from_dvc or is_store_fault(error)


def _fetch_listings(commits: Iterable[str]) -> None:
    sections = (section for commit in commits for section in committed_lock(commit).values())
    folders = {md5 for section in sections for md5 in output_digests(section).values() if md5.endswith(".dir")}
    missing = [md5 for md5 in folders if listing(md5) is None]
    if missing:
        from dvc.repo import Repo  # late: importing it takes half a second
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.transfer import transfer

        with Repo() as repo:
            objects = {HashInfo("md5", md5) for md5 in missing}
            transfer(repo.cloud.get_remote_odb(), repo.cache.local, objects, shallow=True)
