"""`gradtrail gate --timed`: the working folder's training against that of the commit that last accepted the costs."""

from pathlib import Path

from gradtrail.experiments.timed.checkout import check_out, scratch
from gradtrail.experiments.timed.main import Revision, time_revisions
from gradtrail.experiments.timed.ratio import Ratio
from gradtrail.support.errors import UserError
from gradtrail.support.git import git
from gradtrail.support.progress import stdout_console
from gradtrail.support.signals import stopping_on_signals

TOLERANCE = 0.02
"""Fraction by which a training may be slower."""


def is_too_slow(ratio: Ratio) -> bool:
    """Whether the whole interval lies above the tolerance."""
    return ratio.low > 1 + TOLERANCE


def run_timed_gate(accepted: Path, *, seconds: float) -> int:
    """Time the working folder's training against the accepted one; return the exit status, 1 if it is too slow.

    Both use their version of `params.yaml`, and images of MNIST's shape.

    Args:
        accepted: File of accepted costs; the commit that last changed it is A, the working folder B.
        seconds: Budget.

    Raises:
        UserError: There is no such commit, or one of both does not compile.
    """
    commit = git("log", "-1", "--format=%H", "--", str(accepted))
    if not commit:
        raise UserError(f"{accepted}: is in no commit, so there is nothing to time against")
    with stopping_on_signals("stopped"), scratch() as folder:
        before = Revision(name=f"A (commit {commit[:8]})", folder=check_out("A", commit, folder / "A"))
        after = Revision(name="B (the working folder)", folder=Path())
        ratio = time_revisions(before, after, seconds=seconds, cache=folder / "cache")
    console = stdout_console()
    console.print(f"A is commit {commit[:8]}, which accepted the costs; B is the working folder", soft_wrap=True)
    console.print(ratio.describe(), soft_wrap=True)
    if is_too_slow(ratio):
        console.print(f"timed gate: slower by more than {TOLERANCE:.0%}, over the whole interval", soft_wrap=True)
        return 1
    is_known = ratio.high <= 1 + TOLERANCE
    result = "not slower by more than" if is_known else "no proof that it is slower by more than"
    console.print(f"timed gate: {result} {TOLERANCE:.0%}", soft_wrap=True)
    return 0
