"""`gradtrail plan`: what `dvc repro` would do with some params, and how long it would take, before anything runs.

Out of scope: the optional pipelines, and the time that DVC itself takes, one to three seconds.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from gradtrail.stages.common.dvc_cache import is_here
from gradtrail.stages.common.params import IMAGE_FILES, PARAMS, changed, flatten, set_by_option, validate
from gradtrail.stages.common.pipeline_file import (
    TRAIN,
    Entry,
    is_code,
    locked_entry,
    output_digests,
    stages_before,
    upstream_stages,
)
from gradtrail.stages.datasets import DATASETS
from gradtrail.support.errors import UserError, one_line, suggestion
from gradtrail.support.progress import stdout_console
from gradtrail.support.tables import TextTable, duration
from gradtrail.tracking.environment import machine_key
from gradtrail.tracking.run_cache import run_cache_entries
from gradtrail.tracking.state import PlannedStages

if TYPE_CHECKING:
    from gradtrail.experiments.estimate import Estimate

UP_TO_DATE, CACHED, TO_BE_MADE = "up to date", "cached", "to be made"
_MIB = 2**20
_CLASSES = 10  # of every entry of the catalog; those of image files are not counted before `fetch`
_MOST_REASONS = 3  # changed params and files that the table lists for a stage


@dataclass(frozen=True)
class PlannedStage:
    """What `dvc repro` would do with a stage."""

    stage: str
    status: str
    why: str  # what changed; empty if nothing did


def plan(overrides: Sequence[str], stage: str | None) -> bool:
    """Print what would run with some params changed, `key=value` as DVC's `-S` takes them.

    Returns:
        Whether a stage would run, and not only be restored from the cache.
    """
    stages = PlannedStages()
    params = override(stages.params, overrides)
    if stage is not None and stage not in stages.pipeline:
        raise UserError(f"{stage}: dvc.yaml has no such stage{suggestion(stage, stages.pipeline)}")
    names = [*stages_before(stage, stages.pipeline), stage] if stage else [*stages.pipeline]
    planned = [one for one in plan_stages(stages, params) if one.stage in names]
    console = stdout_console()
    if all(one.status == UP_TO_DATE for one in planned):
        console.print(f"all {len(planned)} stages are up to date: nothing would run")
        return False

    from gradtrail.experiments.estimate import estimate  # late: it imports MLflow
    from gradtrail.tracking.store import open_store

    to_be_made = [one.stage for one in planned if one.status == TO_BE_MADE]
    if TRAIN in to_be_made:
        require_network(params)
    client = open_store()
    estimates = {stage: estimate(stage, params, client) for stage in to_be_made}
    rows = []
    for one in planned:
        last = estimates.get(one.stage)
        rows.append(
            {
                "stage": one.stage,
                "status": one.status,
                "time": duration(last.seconds) if last else "unknown" if one.stage in estimates else "",
                "memory, MiB": f"{last.peak_bytes / _MIB:,.0f}" if last and last.peak_bytes else "",
                "why": one.why,
            }
        )
    console.print(TextTable("plan", rows, right=("time", "memory, MiB")))
    for line in describe(planned, estimates):
        console.print(line)
    return bool(to_be_made)


def describe(planned: Sequence[PlannedStage], estimates: "Mapping[str, Estimate | None]") -> Iterator[str]:
    """Yield sentences about the stages to be made: where their times come from, and the sum if all are known."""
    notes: dict[str, list[str]] = {}  # what is said of a time → stages
    for stage, last in estimates.items():
        if last is None:
            note = f"time unknown without a run of this model and data on this kind of machine, {machine_key()}"
            notes.setdefault(note, []).append(stage)
        elif last.earlier.differing:
            notes.setdefault(f"time of the most similar run, with {last.earlier.differences}", []).append(stage)
    yield from (f"{', '.join(stages)}: {note}" for note, stages in notes.items())
    if not estimates:
        yield "nothing would run: the outputs are in DVC's cache"
    elif None not in estimates.values():
        # A stage before may make the outputs that it made last; then those after it do not run
        word = "at most about" if any("after " in one.why for one in planned) else "about"
        total = sum(last.seconds for last in estimates.values() if last)
        yield f"in total {word} {duration(total)}; DVC itself adds a few seconds"


def require_network(params: Mapping[str, Any]) -> None:
    """Build the network for the images of the data set from shapes alone, whether these are here yet or not.

    Raises:
        UserError, ConfigError: the network cannot be built; one line.
    """
    from gradtrail.core.nn.models import Model  # late, as all imports of JAX here: it takes a second
    from gradtrail.core.train.config import TrainConfig

    dataset, pictures = params["fetch"]["dataset"], params["fetch"]["pictures"]
    shape = DATASETS[dataset].image_shape
    if dataset in IMAGE_FILES:
        shape = (*pictures["size"], *([3] if pictures["color"] else []))
    if dataset != "idx":  # whose files alone know the shape
        Model(validate(params[TRAIN], TrainConfig, f"{PARAMS}: train").model_config(shape, _CLASSES))


def override(params: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return params with changes such as `train.epochs=3`, all validated; raise UserError if one is invalid."""
    from gradtrail.experiments.repro import validate_params

    flat, changes = flatten(params), dict[str, Any]()
    for text in texts:
        key, sign, _ = text.partition("=")
        if not (key and sign):
            raise UserError(f"-S: must be KEY=VALUE, such as train.epochs=3; got {text!r}")
        if key not in flat:
            raise UserError(f"-S {text}: {PARAMS} has no key {key!r}{suggestion(key, flat)}")
        changes[key] = _value_of(text)
    validate_params()
    result = changed(params, changes)
    if changes:
        from gradtrail.experiments.param_classes import SECTIONS  # late: the config classes take a second to import

        for section in {key.partition(".")[0] for key in changes} & SECTIONS.keys():
            try:
                validate(result[section], SECTIONS[section], f"{PARAMS}: {section}")
            except UserError as error:  # of the option, or of a block in the file that it chose
                raise UserError(f"{error}{set_by_option(texts)}") from None
    return result


def _value_of(text: str) -> Any:
    """Return the value of an option `-S`, as DVC reads it."""
    from dvc.utils.hydra import to_hydra_overrides  # late: both import DVC and Hydra, which takes a second
    from hydra.errors import OverrideParseException

    quotes = "a text with special characters needs quotes: -S \"KEY='TEXT'\""
    try:
        (option,) = to_hydra_overrides([text])
    except OverrideParseException as error:
        raise UserError(f"-S {text}: {one_line(error).partition(' See ')[0]}; {quotes}") from None
    if option.is_sweep_override():
        raise UserError(f"-S {text}: must be one value; {quotes}")
    return option.value()


def plan_stages(stages: PlannedStages, params: Mapping[str, Any]) -> list[PlannedStage]:
    """Return what `dvc repro` would do with each stage if `params.yaml` had this content, in the pipeline's order."""
    pipeline = stages.pipeline
    outs: dict[str, str] = {}  # output → digest, of the stages that are up to date or cached
    planned: dict[str, PlannedStage] = {}
    cached = functools.cache(lambda: run_cache_entries()[::-1])  # newest first
    for name in TopologicalSorter({name: upstream_stages(name, pipeline) for name in pipeline}).static_order():
        unmade = [before for before in upstream_stages(name, pipeline) if planned[before].status == TO_BE_MADE]
        entry = None if unmade else stages.entry(name, params, outs)
        section = stages.lock.get(name)
        why = ", ".join(
            [*_changes(stages, name, params, entry, section), *[f"after {', '.join(unmade)}"] * bool(unmade)]
        )
        if entry and section and locked_entry(section) == entry:
            if {out: stages.digest(out, {}) for out in pipeline[name].outs} == output_digests(section):
                planned[name] = PlannedStage(name, UP_TO_DATE, "")
                outs |= output_digests(section)
                continue
            why = "its outputs are missing or changed"
        candidates = [*([section] if section else []), *cached()] if entry else []
        made = (output_digests(one) for one in candidates if locked_entry(one) == entry)
        here = next((one for one in made if all(is_here(out, md5) for out, md5 in one.items())), None)
        outs |= here or {}
        planned[name] = PlannedStage(name, TO_BE_MADE if here is None else CACHED, why)
    return [planned[name] for name in pipeline]


def _changes(
    stages: PlannedStages,
    name: str,
    params: Mapping[str, Any],
    entry: Entry | None,
    section: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Yield what differs from the lock, in few words."""
    if section is None:
        yield "never made here"
        return
    locked = locked_entry(section)
    values = stages.values(name, params)
    before, after = (
        {k: v for part in content.values() for k, v in flatten(part).items()} for content in (locked.params, values)
    )
    keys = [key for key in after | before if after.get(key) != before.get(key)]
    deps = (
        dict(entry.deps)
        if entry
        else {dep: stages.digest(dep, {}) for dep in stages.pipeline[name].deps if is_code(dep)}
    )
    files = [dep for dep, md5 in deps.items() if locked.deps.get(dep) != md5]
    reasons = [f"{key} {before.get(key)} → {after.get(key)}" for key in keys] + [f"{file} changed" for file in files]
    yield from reasons[:_MOST_REASONS]
    if len(reasons) > _MOST_REASONS:
        yield f"{len(reasons) - _MOST_REASONS} more"
