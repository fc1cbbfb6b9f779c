"""Outputs that are still of an earlier model, because their stages did not run after a new training or evaluation."""

from collections.abc import Iterable
from pathlib import Path

from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import locked_entry, read_locks

_OUTS = {"export": "models/export", "gradients": "results/gradients", "report": "results/report.html"}
_MODEL = ("models/best.", "models/final.", "models/members", "results/evaluate")


def warn_of_earlier_model(folder: Path, stages: Iterable[str] = _OUTS) -> None:
    """Print a line if outputs of these stages are of other weights or another evaluation than those in `folder`."""
    locks, outs = read_locks(folder), []
    for stage in stages:
        read = locked_entry(locks[stage]).data if stage in locks else {}
        current = {path: digest(folder / path) for path in read if path.startswith(_MODEL) and (folder / path).exists()}
        if any(read[path] != md5 for path, md5 in current.items()) and (folder / _OUTS[stage]).exists():
            outs.append(_OUTS[stage])
    if outs:
        print(f"{', '.join(outs)}: of an earlier model, until `dvc repro` updates them", flush=True)
