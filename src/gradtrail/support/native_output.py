"""Collects what libraries write to the standard streams below Python."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def native_output() -> Iterator[IO[str]]:
    """Collect what C++ libraries write to stdout and stderr, such as gloo's greeting, in a file, which is yielded."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield file
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, saved in zip((1, 2), before, strict=True):
                os.dup2(saved, number)
                os.close(saved)
