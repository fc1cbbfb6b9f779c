"""Refs of a git repository that many write to: what exists there once is agreed on by all.

A push changes refs only from the values that they are expected to have, and all of them or none: git's own
compare-and-swap. A file, an HTTP and an SSH remote all have it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradtrail.cluster.task.shell import SECONDS, CommandError, git

NONE = ""  # the value of a ref that does not exist


class SharedRefs:
    """The refs of a remote repository.

    Args:
        url: its address.
        folder: a repository that has the objects to push, and gets those that are read.
        seconds: that a call of git may take.
        deadline: after which none is made or goes on, by `time.monotonic`.
    """

    def __init__(self, url: str, folder: Path, *, seconds: float = SECONDS, deadline: float = math.inf):
        self._url = url
        self._folder = folder
        self._seconds = seconds
        self._deadline = deadline

    def within(self, seconds: float, deadline: float = math.inf) -> "SharedRefs":
        """Return the same refs, with less time for each call, and none after a deadline."""
        return SharedRefs(self._url, self._folder, seconds=seconds, deadline=deadline)

    def read(self, refs: Sequence[str]) -> dict[str, str]:
        """Return the values of those of the refs that exist."""
        if not refs:
            return {}
        lines = self._git("ls-remote", self._url, *refs).splitlines()
        found = (line.split(maxsplit=1) for line in lines)
        return {ref: value for value, ref in found if ref in refs}

    def swap(self, changes: Mapping[str, tuple[str, str]]) -> bool:
        """Change refs, all or none; return whether all of them had the expected values.

        Args:
            changes: ref → (expected value, new value); `NONE` stands for a ref that does not exist.

        Raises:
            CommandError: the remote cannot be reached or refuses.
        """
        leases = [f"--force-with-lease={ref}:{expected}" for ref, (expected, _) in changes.items()]
        specs = [f"{new}:{ref}" for ref, (_, new) in changes.items()]
        try:
            self._git("push", "--quiet", "--atomic", *leases, self._url, *specs)
        except CommandError:
            now = self.read([*changes])
            if all(now.get(ref, NONE) == new for ref, (_, new) in changes.items()):
                return True  # the push arrived, its answer did not
            if all(now.get(ref, NONE) == expected for ref, (expected, _) in changes.items()):
                raise
            return False
        return True

    def write_blob(self, content: str) -> str:
        """Return the id of a new object, for a ref to name."""
        return self._git("hash-object", "-w", "--stdin", stdin=content)

    def read_blob(self, ref: str, value: str) -> str:
        """Return the content of the object that a ref names."""
        try:
            return self._git("cat-file", "blob", value)
        except CommandError:
            self._git("fetch", "--quiet", "--no-write-fetch-head", self._url, ref)
            return self._git("cat-file", "blob", value)

    def _git(self, *arguments: str, stdin: str = "") -> str:
        left = min(self._seconds, self._deadline - time.monotonic())
        if left <= 0:
            raise CommandError(f"`git {arguments[0]}`: no time is left")
        return git(*arguments, folder=self._folder, stdin=stdin, seconds=left)
