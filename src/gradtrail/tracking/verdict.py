"""Whether an evaluation is better than another one on the same test examples, in one sentence."""

import contextlib
import os
from pathlib import Path

import pandas as pd

from gradtrail.stages.common.dvc_cache import cached_path, listing
from gradtrail.stages.common.pipeline_file import output_digests, parse_lock
from gradtrail.stages.common.yaml_file import parse_yaml
from gradtrail.support.git import CommandError, blobs

STAGE = "evaluate"
_OUT, _FILE, _LOCK = "results/evaluate", "classes.csv", "dvc.lock"


def read_answers(folder: Path) -> pd.DataFrame | None:
    """Return `label` and `predicted` of each test example as the folder's last evaluation has them; None without."""
    with contextlib.suppress(FileNotFoundError):
        return pd.read_csv(folder / _OUT / _FILE, keep_default_na=False, dtype=str)
    return None


def answers_at(commit: str) -> pd.DataFrame | None:
    """Return them as of a commit; None if it has no evaluation, or DVC's cache lacks it."""
    with contextlib.suppress(CommandError, FileNotFoundError):
        lock = parse_lock(parse_yaml(blobs(commit, [_LOCK])[_LOCK], _LOCK), _LOCK)
        files = listing(output_digests(lock.get(STAGE, {})).get(_OUT, ""))
        return pd.read_csv(cached_path((files or {})[_FILE]), keep_default_na=False, dtype=str) if files else None
    return None


def verdict(after: pd.DataFrame, before: pd.DataFrame | None, name: str) -> str:
    """Return the accuracy of `after` and whether it differs from that of `before`, which the sentence calls `name`.

    The interval is that of `mcnemar`, of the difference in points.
    """
    accuracy = f"test accuracy {(after['label'] == after['predicted']).mean():.2%}"
    if before is None:
        return f"{accuracy}; {name} has no evaluation to compare with"
    accuracy += f", {name} {(before['label'] == before['predicted']).mean():.2%}"
    if not after["label"].equals(before["label"]):
        return f"{accuracy}, with other test data: not comparable"
    from gradtrail.support.significance import mcnemar  # late: SciPy, which the stage `evaluate` needs for this alone

    is_right, was_right = (answers["label"] == answers["predicted"] for answers in (after, before))
    test = mcnemar(int((is_right & ~was_right).sum()), int((was_right & ~is_right).sum()), len(after))
    interval = f"95 % {100 * test.low:+.2f} to {100 * test.high:+.2f} points".replace("-", "−")
    if (is_right == was_right).all():
        return f"{accuracy}: right and wrong on the same examples"
    if test.low <= 0 <= test.high:
        return f"{accuracy}: not distinguishable, {interval}"
    return f"{accuracy}: {'better' if test.difference > 0 else 'worse'}, {interval}"


def print_verdict_of_experiment(folder: Path) -> None:
    """Print how the evaluation of a DVC experiment differs from that of the commit that it began from."""
    after, commit = read_answers(folder), os.environ.get("DVC_EXP_BASELINE_REV", "")
    if after is not None and commit:
        print(f"{STAGE}: {verdict(after, answers_at(commit), commit[:7])}")
