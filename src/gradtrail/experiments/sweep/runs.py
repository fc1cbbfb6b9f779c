"""The runs of a comparison that were made: rows in MLflow, found by what DVC itself compares.

A run counts where DVC would find nothing to do for its params: each stage up to the evaluation has a finished row of
the same command, params, versions, code and data, as `dvc.lock` would have them. So runs of other code or of other raw
data are never mixed in, whoever made them; and what a row says of the evaluation is what the evaluation with the
present params said. What is not told: of which machine a row is, and what ran beside it, which its seconds depend on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from gradtrail.experiments.sweep.spec import STAGE, Comparison, PlannedRun, params_of
from gradtrail.stages.common.digests import digest
from gradtrail.stages.common.overrides import PARAMS
from gradtrail.stages.common.params import read_yaml
from gradtrail.stages.common.pipeline_file import Entry, StageSpec, contains_path, values_of
from gradtrail.tracking.lineage.dvc_cache import digest_within
from gradtrail.tracking.lineage.keys import entry_key
from gradtrail.tracking.lineage.state import Identity
from gradtrail.tracking.mlflow.search import Find
from gradtrail.tracking.mlflow.stored_run import REBUILT

_OUTPUT = "output/"  # how the tags begin that have the digests of what was written


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """What came out of a run.

    Attributes:
        accuracy: on the test split.
        loss: likewise, the mean.
        seconds: of the training loop; None where the row was made again from its outs, which do not have it.
        compile_seconds: of the training stage; likewise.
        dataset: its name and the beginning of its digest.
        row: id of the training's row.
    """

    run: PlannedRun
    accuracy: float
    loss: float
    seconds: float | None
    compile_seconds: float | None
    dataset: str
    row: str


class MadeRuns:
    """Finds runs.

    Args:
        find: finds rows by their tags.
    """

    def __init__(self, find: Find):
        self._find = find
        self._stage = Identity(STAGE)
        self._digests: dict[str, str] = {}

    def among(self, wanted: Iterable[PlannedRun], comparison: Comparison) -> list[CompletedRun]:
        """Return those of the wanted runs that were made, in their order."""
        found = ((run, self._rows(params_of(run, comparison, self._params))) for run in wanted)
        return [_made(run, rows["train"], rows[STAGE]) for run, rows in found if rows]

    def _rows(self, params: Mapping[str, Any]) -> dict[str, Run] | None:
        """Return the row of each stage with these params; None where a stage has none."""
        outs: dict[str, str] = {}
        rows: dict[str, Run] = {}
        for name in self._stage.lineage:
            entry = self._entry(self._stage.pipeline[name], params, outs)
            found = self._find({"entry": entry_key(name, entry)}, finished=True) if entry else []
            if not found:
                return None
            rows[name] = next((row for row in found if REBUILT not in row.data.tags), found[0])
            tags = rows[name].data.tags.items()
            outs |= {tag.removeprefix(_OUTPUT): md5 for tag, md5 in tags if tag.startswith(_OUTPUT)}
        return rows

    def _entry(self, spec: StageSpec, params: Mapping[str, Any], outs: Mapping[str, str]) -> Entry | None:
        """Return what determines a stage's outs; None where it reads what nobody knows any more."""
        contents = {name: params if name == str(PARAMS) else read_yaml(Path(name)) for name in spec.params}
        values = {name: values_of(contents[name], keys, name) for name, keys in spec.params.items()}
        deps = {dep: self._dep(dep, outs) for dep in spec.deps}
        known = {dep: md5 for dep, md5 in deps.items() if md5 is not None}
        return Entry(cmd=spec.cmd, params=values, deps=known) if len(known) == len(deps) else None

    def _dep(self, dep: str, outs: Mapping[str, str]) -> str | None:
        """Return the digest of a dep: of what a stage before wrote, else, of code, of the file as it is now."""
        for out, md5 in outs.items():
            if contains_path(out, dep):
                return digest_within(out, md5, dep)
        if dep not in self._digests:
            self._digests[dep] = digest(Path(dep))
        return self._digests[dep]

    @cached_property
    def _params(self) -> dict[str, Any]:
        return read_yaml(PARAMS)


def _made(run: PlannedRun, train: Run, evaluation: Run) -> CompletedRun:
    tags = train.data.tags
    return CompletedRun(
        run=run,
        accuracy=evaluation.data.metrics["eval/accuracy"],
        loss=evaluation.data.metrics["eval/loss"],
        seconds=train.data.metrics.get("train/seconds"),
        compile_seconds=train.data.metrics.get("train/compile_total_seconds"),
        dataset=f"{tags['dataset']} {tags['dataset_digest'][:8]}",
        row=train.info.run_id,
    )
