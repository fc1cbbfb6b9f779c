"""The entries of `experiments.yaml`: variants of the params, and the seeds that each of them is trained with.

An entry lists `variants`, or has a `grid` whose combinations are the variants; its `set` changes the params of all of
them, and is the only variant of an entry without either. Out of scope: entries with the key `search`, which belong to
`experiments/search.py`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradtrail.stages.common.params import MEMBERS, PARAMS, SEED, VARY, require_known, validate
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.stages.common.yaml_file import parse_yaml, read_yaml
from gradtrail.support.errors import UserError, suggestion

PATH = Path("experiments.yaml")
STAGE = "evaluate"  # the last stage that a comparison runs
SEARCH = "search"  # key of the entries of `experiments/search.py`


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An entry: variants of the training, and the seeds over which they are compared."""

    name: str
    about: str = ""
    seeds: tuple[int, ...] = ()  # by default that of `params.yaml`
    timed: bool = False  # True if training times are compared: then every seed is a training of its own
    set: dict[str, Any] = field(default_factory=dict)  # changes of all variants, dotted key → value
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # label → all its changes, once it is read
    grid: dict[str, list[Any]] = field(default_factory=dict)  # key → values; the seed may be one of the keys

    @property
    def baseline(self) -> str | None:
        """The variant that the others are compared with: the first of several."""
        return next(iter(self.variants)) if len(self.variants) > 1 else None

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Variant and seed of each run."""
        return [*itertools.product(self.variants, self.seeds)]

    def changes(self, variant: str, seeds: range) -> dict[str, Any]:
        """Return the changes to the params for a training whose members have consecutive seeds."""
        return self.variants[variant] | {SEED: seeds.start, MEMBERS: len(seeds)}


def read_entries(path: Path = PATH) -> dict[str, Comparison | dict[str, Any]]:
    """Read all entries; one with the key `search` is returned as it is. UserError names an invalid entry and key."""
    entries: dict[str, Comparison | dict[str, Any]] = {}
    for name, content in read_yaml(path).items():
        is_search = isinstance(content, dict) and SEARCH in content
        entries[name] = content if is_search else _comparison(name, content, f"{path}: {name}")
    return entries


def choose(name: str) -> Comparison | dict[str, Any]:
    """Return the entry of that name, or raise UserError."""
    entries = read_entries()
    if name not in entries:
        raise UserError(f"{PATH}: no entry {name}; it has {', '.join(entries)}{suggestion(name, entries)}")
    return entries[name]


def parse_params(texts: Sequence[str], option: str = "--params") -> Comparison:
    """Return the comparison of all combinations of values, from an option's texts such as `train.seed=0,1,2`."""
    grid: dict[str, Any] = {}
    for text in texts:
        key, sign, values = text.partition("=")
        if not (key and sign):
            raise UserError(f"{option}: must be KEY=VALUE,VALUE, such as train.seed=0,1,2; got {text!r}")
        grid[key] = parse_yaml(f"values: [{values}]".encode(), f"{option} {key}")["values"]
    return _comparison("params", {"grid": grid}, option)


def with_seeds(comparison: Comparison, seeds: Sequence[int] | None) -> Comparison:
    """Return a comparison over the seeds of `--seeds`, if there are any; raise UserError if one is invalid."""
    return comparison if seeds is None else replace(comparison, seeds=_require_seeds(seeds, "--seeds"))


def _require_seeds(seeds: Sequence[Any], name: str) -> tuple[int, ...]:
    """Return the seeds; raise UserError if there are none, one is repeated, or one is invalid."""
    are_integers = all(type(seed) is int for seed in seeds)
    if not seeds or not are_integers or len({*seeds}) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**32:
        rule = f"distinct integers from 0 to {2**32 - 1:,}, such as 0,1,2"
        raise UserError(f"{name}: must be {rule}; got {', '.join(map(str, seeds))}")
    return tuple(seeds)


def _comparison(name: str, content: Any, place: str) -> Comparison:
    fields = content | {"name": name} if isinstance(content, dict) else content
    entry, params = validate(fields, Comparison, place), read_yaml(PARAMS)
    if entry.variants and entry.grid:
        raise UserError(f"{place}: has variants and a grid; one of them is allowed")
    grid = {key: values for key, values in entry.grid.items() if key != SEED}
    seeds = entry.grid.get(SEED, entry.seeds or (params["train"]["seed"],))
    sections = (*stages_before(STAGE, read_pipeline()), STAGE)
    grid_place = place if place.startswith("-") else f"{place}.grid"
    changes = {f"{place}.set": entry.set, grid_place: grid}
    changes |= {f"{place}.variants.{label}": variant for label, variant in entry.variants.items()}
    for part, own_changes in changes.items():
        require_known(params, own_changes, part)
        for key in own_changes:
            if key in (SEED, MEMBERS, VARY):
                raise UserError(f"{part}: {key} must not differ: all variants use the same seeds, one a training")
            if key.partition(".")[0] not in sections:
                raise UserError(f"{part}: {key} changes neither training nor evaluation")
    if empty := next((key for key, values in grid.items() if not values), None):
        raise UserError(f"{grid_place}: {empty} has no values")
    variants = entry.variants or (_combinations(grid) if grid else {name: {}})
    return replace(
        entry,
        seeds=_require_seeds(seeds, f"{place}.seeds"),
        variants={label: entry.set | variant for label, variant in variants.items()},
    )


def _combinations(grid: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Return all combinations of a grid, labelled by the keys that have several values, or else by all keys."""
    varied = [key for key, values in grid.items() if len(values) > 1] or [*grid]
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return {", ".join(f"{key.removeprefix('train.')}={point[key]}" for key in varied): point for point in points}
