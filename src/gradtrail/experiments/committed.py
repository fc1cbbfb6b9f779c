"""Compares the outs with those of the committed `dvc.lock`, which another kind of machine may have computed.

`dvc.lock` does not say on what it was made; `machines.yaml`, written here and committed with it, does. A last bit that
differs grows while a network trains, so differences of metrics are shown beside their spread over seeds.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import parse_yaml, read_yaml
from gradtrail.stages.common.pipeline_file import is_code, locked_entry, outs_of, read_locks, sha256_of, stages_before
from gradtrail.support.errors import UserError
from gradtrail.support.git import blobs, head_commit
from gradtrail.tracking.lineage.environment import machine_key
from gradtrail.tracking.lineage.snapshots import snapshot_of
from gradtrail.tracking.lineage.state import Identity

_MACHINES = Path("machines.yaml")
_HEADER = (
    "# The kind of machine that computed the outs of a stage in dvc.lock, and a digest of these outs: vendor, family,\n"
    "# model and vector instructions of its processor. `gradtrail repro` writes it; commit it with dvc.lock.\n"
)
# Standard deviation over seeds 0 to 4 of the default params on MNIST; docs/guarantees.md says how it was measured.
SPREAD_ON = "mnist"
SPREAD = {
    ("train", "validation_accuracy"): 0.0006,
    ("train", "validation_loss"): 0.0008,
    ("evaluate", "accuracy"): 0.0007,
    ("evaluate", "loss"): 0.0008,
    ("evaluate", "expected_calibration_error"): 0.0010,
    ("gradients", "rank_correlation_loss"): 0.004,
    ("gradients", "noise_scale_typical"): 170.0,
}
_TOLERANCE = 3  # standard deviations
_UNKNOWN = "unknown"


def record_machines() -> None:
    """Write to `machines.yaml` which kind of machine computed the stages whose outs are others than those it names.

    Their runs in MLflow say it, where none was rebuilt from its outs; else it is unknown.
    """
    here, known = read_locks(Path()), _read_machines()
    digests = {name: _outs_digest(section) for name, section in here.items()}
    if {name: found.get("outs") for name, found in known.items()} == digests:
        return
    from gradtrail.tracking.mlflow.client import open_store  # late: it imports MLflow
    from gradtrail.tracking.mlflow.search import RunIndex, find_equivalent_run

    index = RunIndex(open_store())
    machines = {}
    for name, outs in digests.items():
        machines[name] = known.get(name, {})
        if machines[name].get("outs") != outs:
            run = find_equivalent_run(index, Identity(name, from_lock=True))
            machine = run.data.tags.get("machine") if run else None
            machines[name] = {"outs": outs, "machine": machine or _UNKNOWN}
    with atomic_file(_MACHINES) as beside, beside.open("w", encoding="utf-8") as stream:
        stream.write(_HEADER)
        YAML().dump(machines, stream)


def describe_differences() -> list[str]:
    """Return lines that say which outs differ from the committed `dvc.lock`, though code and params are the same."""
    head = snapshot_of("HEAD") if head_commit() else None
    if head is None:
        return []
    here = read_locks(Path())
    same = {name for name in head.lock if name in here and _made_by(head.lock[name]) == _made_by(here[name])}
    differing = [
        name
        for name in head.lock
        if same.issuperset([*stages_before(name, head.pipeline), name])
        and outs_of(head.lock[name]) != outs_of(here[name])
    ]
    if not differing:
        return []
    machines = _committed_machines()
    made_on = {
        found["machine"]
        for name in differing
        if (found := machines.get(name, {})).get("outs") == _outs_digest(head.lock[name])
    } - {_UNKNOWN}
    made = f"made on {', '.join(sorted(made_on))}" if made_on else "made on a machine that machines.yaml does not name"
    return [
        f"bytes differ from the committed dvc.lock, {made}; this machine is {machine_key()}: {', '.join(differing)}",
        *_metric_lines(differing),
    ]


def _metric_lines(stages: list[str]) -> list[str]:
    lines, beyond = [], []
    files = {stage: f"metrics/{stage}.json" for stage in stages}
    committed = blobs("HEAD", files.values())
    for (stage, key), spread in SPREAD.items():
        if stage in stages and files[stage] in committed:
            texts = (committed[files[stage]], Path(files[stage]).read_bytes())
            before, after = map(json.loads, texts)
            if after.get("dataset") != SPREAD_ON:
                continue
            then, now = before.get(key, math.nan), after.get(key, math.nan)
            change = f"{now - then:+.2g}; standard deviation over seeds {spread:.2g}"
            lines.append(f"  {stage} {key} {then:.6g} → {now:.6g} ({change})")
            if not abs(now - then) <= _TOLERANCE * spread:
                beyond.append(f"{stage} {key}")
    if not lines:
        return []
    within = f"{_TOLERANCE} standard deviations over seeds"
    verdict = f"differ by more than {within}: {', '.join(beyond)}" if beyond else f"agree within {within}"
    return [f"  metrics {verdict}", *lines]


def _made_by(section: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what makes the outs of a stage, the data aside, which stages before it may have computed otherwise."""
    entry = locked_entry(section)
    return entry.cmd, entry.params, {dep: md5 for dep, md5 in entry.deps.items() if is_code(dep)}


def _outs_digest(section: Mapping[str, Any]) -> str:
    return sha256_of(outs_of(section))[:16]


def _read_machines() -> dict[str, dict[str, str]]:
    return _checked(read_yaml(_MACHINES)) if _MACHINES.is_file() else {}


def _committed_machines() -> dict[str, dict[str, str]]:
    found = blobs("HEAD", [str(_MACHINES)]).get(str(_MACHINES))
    return _checked(parse_yaml(found, str(_MACHINES))) if found else {}


def _checked(content: Any) -> dict[str, dict[str, str]]:
    if not isinstance(content, dict) or not all(isinstance(one, dict) for one in content.values()):
        raise UserError(
            f"{_MACHINES}: expected `stage: {{outs: …, machine: …}}`; delete it, and `gradtrail repro` writes it again"
        )
    return {name: {key: str(value) for key, value in one.items()} for name, one in content.items()}
