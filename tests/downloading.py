"""A file to download, and a client of mirrors that knows what a download leaves behind."""

import gzip
import hashlib
from pathlib import Path

import pytest

from gradtrail.stages.fetch.download import KnownFile, Mirrors
from gradtrail.support.errors import NoSourceError

CONTENT = b"".join(hashlib.sha256(bytes([seed])).digest() * 2 for seed in range(256)) * 16  # 256 KiB, hard to compress
PACKED = gzip.compress(CONTENT, mtime=0)
HALF = len(PACKED) // 2
FILE = KnownFile(name="images", max_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


class Client:
    """Mirrors with their folders under `folder`; `reports` lists what was reported."""

    def __init__(self, folder: Path, *bases: str, timeout_seconds: float = 10.0) -> None:
        self.to = folder / "raw" / FILE.name
        self.parts = folder / "parts"
        self.reports: list[str] = []
        self.mirrors = Mirrors(
            bases=bases, parts=self.parts, timeout_seconds=timeout_seconds, report=self.reports.append
        )

    def assert_delivered_by(self, base: str) -> None:
        assert self.mirrors.download(FILE, self.to) == base
        assert self.to.read_bytes() == CONTENT
        assert list(self.to.parent.iterdir()) == [self.to]
        assert list(self.parts.glob("*")) == []

    def refusal(self) -> str:
        """Return the last reason reported of a download that fails."""
        with pytest.raises(NoSourceError, match=r"mirrors: none delivered images\.gz"):
            self.mirrors.download(FILE, self.to)
        assert list(self.to.parent.glob("*")) == []
        assert not any("\n" in report for report in self.reports)
        return self.reports[-1]

    def part(self, base: str) -> Path:
        return self.parts / f".images.{hashlib.sha256(f'{base}/images.gz'.encode()).hexdigest()[:8]}.part"
