"""One process at a time makes a state: two would write the same bytes twice, and every point of a curve."""

import contextlib
import sys
from collections.abc import Iterator

from filelock import FileLock, Timeout

from gradtrail.io.identity import Identity
from gradtrail.io.workspace import private_folder


@contextlib.contextmanager
def only_maker(stage: Identity) -> Iterator[None]:
    """Hold the lock of the state that a stage is about to make; where another process has it, say so and wait.

    The system frees the lock of a process that was killed.
    """
    folder = private_folder() / "locks"
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / f"{stage.name}-{stage.state[:32]}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{stage.name}: another process makes this very state; waiting for it to end", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
