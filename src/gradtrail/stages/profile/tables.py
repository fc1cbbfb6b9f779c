"""Static costs of compiled functions as tables and metrics."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from gradtrail.core.profile.variants import CompiledVariant, Variant

_KEYS = ["function", "precision", "batch_size", "remat"]
DOUBLED = ("flops", "touched_bytes", "temporary_bytes", "total_bytes")
_COMPARED = {"train_step": ("flops", "total_bytes"), "predict": ("flops",)}


def cost_table(compiled: Sequence[CompiledVariant]) -> pd.DataFrame:
    """Return a row for each function of each variant: its `StaticCost`."""
    rows = [
        {"function": name, **dataclasses.asdict(variant.variant), **dataclasses.asdict(function.cost)}
        for variant in compiled
        for name, function in variant.functions.items()
    ]
    columns = [*_KEYS, *(key for key in rows[0] if key not in _KEYS)]
    return pd.DataFrame(rows, columns=columns).sort_values(_KEYS, ignore_index=True)


def doubling_table(table: pd.DataFrame, configured: Variant, columns: Sequence[str] = DOUBLED) -> pd.DataFrame:
    """Return the factors by which doubling the batch size multiplies columns of a table, for each function.

    Returns:
        A row for each pair of batch sizes of which one is twice the other: `function`, `batch_size` and `doubled`, and
        a factor for each of `columns`, NaN if the value at the smaller size is 0.
    """
    part = configured_rows(table, configured, but="batch_size")[["function", "batch_size", *columns]]
    doubled = part.assign(batch_size=part["batch_size"] / 2)
    pairs = part.merge(doubled, on=["function", "batch_size"], suffixes=("", "_doubled"))
    factors = {name: pairs[f"{name}_doubled"] / pairs[name].replace(0, np.nan) for name in columns}
    keys = {"function": pairs["function"], "batch_size": pairs["batch_size"], "doubled": 2 * pairs["batch_size"]}
    return pd.DataFrame(keys | factors).sort_values(["function", "batch_size"], ignore_index=True)


def configured_rows(table: pd.DataFrame, configured: Variant, *, but: str) -> pd.DataFrame:
    """Return the rows of the configured variant, and those that differ from it in the column `but` alone."""
    fixed = {key: value for key, value in dataclasses.asdict(configured).items() if key != but}
    same = np.logical_and.reduce([table[key] == value for key, value in fixed.items()])
    return table[same]


def write_tables(folder: Path, costs: pd.DataFrame, doubling: pd.DataFrame) -> None:
    """Write `costs.csv` and `doubling.csv` to a new folder."""
    folder.mkdir(parents=True)
    costs.to_csv(folder / "costs.csv", index=False)
    doubling.round(6).to_csv(folder / "doubling.csv", index=False)


def measure(costs: pd.DataFrame, configured: Variant) -> dict[str, int]:
    """Return the main costs of the configured variant as flat metrics, `<function>_<cost>`; the tables have more."""
    by_function = configured_rows(costs, configured, but="").set_index("function")
    return {f"{name}_{cost}": int(by_function[cost][name]) for name, names in _COMPARED.items() for cost in names}
