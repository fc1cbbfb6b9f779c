"""`gradtrail upgrade jax==X`: rehearse other versions of packages before the project changes.

An environment is made of the lock with the change. DVC runs experiments with three seeds in it and in the present one;
their programs, outputs and accuracies are compared, and the trainings are timed in turn. Out of scope: accelerators,
whose packages `locks/base.lock` does not have.
"""

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from gradtrail.experiments.diff import difference_tables, find_details
from gradtrail.experiments.timed.revisions import Revision, scratch, time_revisions
from gradtrail.stages.common.params import as_options
from gradtrail.stages.common.pipeline_file import output_digests
from gradtrail.stages.common.versions import NETWORK_VERSIONS, VERSIONS
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.errors import UserError, suggestion
from gradtrail.support.git import git, run, uv, with_interpreter
from gradtrail.support.paths import private_folder
from gradtrail.support.significance import paired_difference
from gradtrail.tracking.dvc_history import find_experiments, snapshot_of

SEEDS = (0, 1, 2)
LOCK = Path("locks/base.lock")
_STAGES = ("fetch", "preprocess", "train", "evaluate", "gradients")
_METRICS = "./results/metrics/evaluate.json"
_NOW = Path(sys.executable)
_PIN = re.compile(r"([a-z0-9][a-z0-9-]*)==([0-9][\w.!+]*)")


def upgrade(words: Sequence[str], *, python: Path, seconds: float) -> None:
    """Rehearse requests `PACKAGE==VERSION` and print their effects; raise UserError if the project does not run."""
    pins = read_pins(words)
    if jax.default_backend() != "cpu":
        raise UserError(f"upgrade: {LOCK} has no packages for accelerators; set JAX_PLATFORMS=cpu")
    label = "-".join(f"{package}-{version}" for package, version in pins.items())
    folder = private_folder() / "upgrade" / label

    # The new environment
    old, resolved = locked(LOCK), locked(resolve(pins, folder, python))
    changed = {name: version for name, (version, *_) in resolved.items() if version not in old.get(name, ())}
    for name, version in changed.items():
        print(f"{name} {', '.join(old.get(name, ['(none)']))} → {version}")
    uv("venv", "--quiet", "--clear", "--python", str(python), str(folder / "venv"))
    new = folder / "venv/bin/python"
    uv("pip", "sync", "--quiet", "--require-hashes", "--python", str(new), str(folder / LOCK.name))

    # Experiments in both; stages depend on the recorded versions, so those of the new environment are set
    files = [file for file in (VERSIONS, NETWORK_VERSIONS) if file.exists()]
    recorded = {f"{file}:{name}": f"'{changed[name]}'" for file in files for name in read_yaml(file) if name in changed}
    names = [f"upgrade-now-seed-{seed}" for seed in SEEDS], [f"upgrade-{label}-seed-{seed}" for seed in SEEDS]
    commits: list[list[str]] = []
    for side, interpreter, changes in ((names[0], _NOW, {}), (names[1], new, recorded)):
        commits.append([])
        for seed, name in zip(SEEDS, side, strict=True):
            print(f"running the experiment {name}")
            targets = ("evaluate", "gradients") if seed == SEEDS[0] else ("evaluate",)
            commits[-1].append(run_experiment(name, interpreter, {**changes, "train.seed": seed}, targets))

    # Programs, outputs, accuracy and time
    for stage in _STAGES[2:]:
        functions = difference_tables(*find_details((names[0][0], names[1][0]), stage))["functions"]
        other = [row["function"] for row in functions if row["program"] != "same"]
        print(f"programs of {stage}: {len(other)} of {len(functions)} differ: {', '.join(other) or 'none'}")
    same = [equal_outputs(*pair) for pair in zip(*commits, strict=True)]
    for words, is_same in (("equal", True), ("other", False)):
        outs = [out for out in same[0] if all(one[out] for one in same) == is_same]
        print(f"{words} bytes: {', '.join(outs) or 'none'}")
    metrics = [[json.loads(git("show", f"{commit}:{_METRICS}")) for commit in side] for side in commits]
    before, after = ([metric["accuracy"] for metric in side] for side in metrics)
    gain = paired_difference(after, before)
    print(
        f"test accuracy over {len(SEEDS)} seeds: {np.mean(before):.4f} now, then {np.mean(after):.4f}; "
        f"difference {gain.mean:+.4f} (95 % interval {gain.low:+.4f} to {gain.high:+.4f})"
    )
    with scratch() as work:
        revisions = Revision("A (now)", Path()), Revision(f"B ({label})", Path(), new)
        ratio = time_revisions(*revisions, seconds=seconds, cache=work)
    print(f"time: A is now, B {label}: {ratio.describe()}")
    print(f"more: gradtrail diff {names[0][0]} {names[1][0]} [--stage STAGE]")


def read_pins(words: Sequence[str]) -> dict[str, str]:
    """Return the requested versions, package → version; raise UserError for a word that is not PACKAGE==VERSION."""
    current, pins = locked(LOCK), dict[str, str]()
    for word in words:
        if not (match := _PIN.fullmatch(word)):
            raise UserError(f"{word}: must be PACKAGE==VERSION, such as jax==0.10.2")
        if match[1] not in current:
            raise UserError(f"{word}: {LOCK} has no package {match[1]}{suggestion(match[1], current)}")
        pins[match[1]] = match[2]
    return pins


def locked(lock: Path) -> dict[str, list[str]]:
    """Return the versions in a lock, package → versions; a package may have several, for different systems."""
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"(?m)^([a-z0-9-]+)==([^\s;\\]+)", lock.read_text(encoding="utf-8")):
        versions.setdefault(name, []).append(version)
    return versions


def resolve(pins: Mapping[str, str], folder: Path, python: Path) -> Path:
    """Resolve the requirements with the versions of some packages; others move only if they must. Return the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    unchanged = [text for text in requirements if re.split(r"[^\w-]", text)[0] not in pins]
    pinned = [f"{name}=={version}" for name, version in pins.items()]
    (folder / "requirements.in").write_text("\n".join([*unchanged, *pinned]), encoding="utf-8")
    lock = folder / LOCK.name
    lock.write_bytes(LOCK.read_bytes())
    options = ("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet")
    uv("pip", "compile", str(folder / "requirements.in"), *options, "--python", str(python), "-o", str(lock))
    return lock


def run_experiment(name: str, python: Path, changes: Mapping[str, str | int], targets: Sequence[str]) -> str:
    """Run an experiment with an interpreter, in place of an earlier one of this name; return its commit."""
    if any(experiment.name == name for experiment in find_experiments()):
        run([str(_NOW), "-m", "dvc", "exp", "remove", name])
    command = [str(_NOW), "-m", "dvc", "exp", "run", "--temp", "--name", name, *as_options(changes)]
    run([*command, *targets], env=with_interpreter(python), seconds=None)
    return next(experiment.commit for experiment in find_experiments() if experiment.name == name)


def equal_outputs(before: str, after: str) -> dict[str, bool]:
    """Return, for each output of the stages, whether it has equal bytes in two commits."""
    snapshots = [snapshot for commit in (before, after) if (snapshot := snapshot_of(commit))]
    one, other = (
        {out: md5 for stage in _STAGES for out, md5 in output_digests(snapshot.lock[stage]).items()}
        for snapshot in snapshots
    )
    return {out: other.get(out) == md5 for out, md5 in one.items()}
