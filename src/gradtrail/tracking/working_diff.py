"""The changes of the working folder since its commit, as a run's `git.diff` has them; secrets are out of its scope."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from gradtrail.support.git import CommandError, git, git_bytes

NOT_IN_GIT = "# not in git: "  # begins lines that are not part of the diff
# What stages read of git's files, without what they change: no other file restores a run, and one may be a secret
READ = ("src", "pipeline", "dvc.yaml", "params.yaml")
_PATHS = (*READ, ":(exclude,glob)pipeline/**/dvc.lock", ":(exclude,glob)pipeline/**/.dvcignore")
_FOR_GIT_APPLY = ("--binary", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_NEW_ALERT = re.compile(rb"(?m)^(\+ *alert: *)\S.*$")  # `runtime.alert` may have an address or a token that is a secret
_MAX_UNTRACKED_BYTES = 2**17  # larger files are data rather than code


def has_changes() -> bool:
    """Whether files that stages read differ from the commit; CommandError if git fails."""
    return git("status", "--porcelain", "--", *_PATHS) != ""


def write_diff(path: Path) -> None:
    """Write the changes since the commit as bytes, as source files need not be UTF-8; only warn if git fails."""
    try:
        path.write_bytes(working_diff())
    except CommandError as error:
        print(f"warning: {error}; the run in MLflow has no git.diff", file=sys.stderr)


def working_diff() -> bytes:
    """Return the changes since the commit of what stages read, in the form of `git apply`.

    Small untracked text files are in it as new files, unless their name begins with a dot; other untracked files are
    named in lines that begin with `NOT_IN_GIT`.
    """
    listed = git_bytes("ls-files", "--others", "--exclude-standard", "-z", "--", *_PATHS)
    untracked = [name for name in listed.split(b"\0") if name]
    text = [name for name in untracked if _is_source(Path(os.fsdecode(name)))]
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"  # a copy with the new files; git's own index does not change
        with_index = {"GIT_INDEX_FILE": str(index)}
        shutil.copy2(git("rev-parse", "--git-path", "index"), index)
        add = ("--literal-pathspecs", "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
        git_bytes(*add, stdin=b"\0".join(text), env=with_index)
        diff = git_bytes("diff", *_FOR_GIT_APPLY, "HEAD", "--", *_PATHS, env=with_index)
    left_out = (NOT_IN_GIT.encode() + name + b"\n" for name in untracked if name not in text)
    return b"".join(left_out) + _NEW_ALERT.sub(rb"\1''", diff)


def _is_source(path: Path) -> bool:
    """Whether an untracked file is small, text and not hidden."""
    is_file = path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_UNTRACKED_BYTES
    return is_file and not path.name.startswith(".") and b"\0" not in path.read_bytes()
