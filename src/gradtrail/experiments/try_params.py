"""`gradtrail try`: what other params do to the test accuracy, without touching the files here.

Each combination of values is a DVC experiment up to `evaluate` in a copy of the project, so `dvc exp apply` keeps it.
"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gradtrail.experiments.compare.spec import parse_params
from gradtrail.experiments.plan import UP_TO_DATE, override, plan_stages
from gradtrail.stages.common.dvc_cache import require_copies
from gradtrail.stages.common.params import SEED, as_options, as_overrides
from gradtrail.stages.common.pipeline_file import stages_before
from gradtrail.support.git import git, with_interpreter
from gradtrail.support.tables import duration
from gradtrail.tracking.state import PlannedStages
from gradtrail.tracking.verdict import STAGE, answers_at, read_answers, verdict


def try_params(overrides: Sequence[str]) -> int:
    """Run an experiment for each combination of values, and print a sentence about each; return the exit status.

    Args:
        overrides: texts such as `train.model=cnn,resnet`.

    Raises:
        UserError: one line; a key or a value is invalid. Nothing has run then.
    """
    entry, stages = parse_params(overrides, "-S"), PlannedStages()
    of_seeds = [{SEED: seed} if SEED in entry.grid else {} for seed in entry.seeds]
    combinations = [variant | of_seed for variant in entry.variants.values() for of_seed in of_seeds]
    for changes in combinations:
        override(stages.params, as_overrides(changes))
    require_copies()
    before = read_answers(Path())
    made = {*stages_before(STAGE, stages.pipeline), STAGE}
    planned = plan_stages(stages, stages.params)
    if before is not None and any(one.status != UP_TO_DATE for one in planned if one.stage in made):
        print(
            f"results/{STAGE} is of other params or data: `dvc repro {STAGE}` makes one to compare with",
            file=sys.stderr,
        )
        before = None
    for changes in combinations:
        label = ", ".join(f"{key.removeprefix('train.')}={value}" for key, value in changes.items())
        name, started = free_name(label), time.perf_counter()
        command = [sys.executable, "-m", "dvc", "exp", "run", "--temp", "--name", name, *as_options(changes), STAGE]
        done = subprocess.run(command, check=False, env=with_interpreter(), stdout=sys.stderr.fileno())
        if done.returncode:
            return done.returncode
        seconds = time.perf_counter() - started
        if (after := answers_at(commit_of(name))) is None:
            raise RuntimeError(f"{name}: the experiment left no evaluation")
        print(f"{label}: {verdict(after, before, 'workspace')}, {duration(seconds)}; keep it: dvc exp apply {name}")
    return 0


def free_name(label: str) -> str:
    """Return a name for an experiment that says what differs, such as `model-cnn`, with a number if it is taken."""
    stem = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60] or "as-it-is"
    name, number = stem, 1
    while commit_of(name):
        number += 1
        name = f"{stem}-{number}"
    return name


def commit_of(name: str) -> str:
    """Return the commit of an experiment; empty if there is none."""
    return git("for-each-ref", "--format=%(objectname)", f"refs/exps/*/*/{name}").partition("\n")[0]
