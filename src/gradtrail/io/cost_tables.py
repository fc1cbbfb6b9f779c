"""Static costs of compiled functions as a table and as metrics."""

import dataclasses
from pathlib import Path

import pandas as pd

from gradtrail.core.profiling import Variant


def cost_table(variants: list[Variant]) -> pd.DataFrame:
    """Return a row for each function of each variant."""
    rows = [
        {
            "function": function.name,
            "precision": variant.precision,
            "batch_size": variant.batch_size,
            **dataclasses.asdict(function.cost),
        }
        for variant in variants
        for function in variant.functions
    ]
    return pd.DataFrame(rows).sort_values(["function", "precision", "batch_size"], ignore_index=True)


def write_table(folder: Path, table: pd.DataFrame) -> None:
    """Write `costs.csv` to a new folder."""
    folder.mkdir(parents=True)
    table.to_csv(folder / "costs.csv", index=False)


def measure(table: pd.DataFrame, precision: str, batch_size: int) -> dict[str, int]:
    """Return FLOPs, bytes and memory of the configured variant as flat metrics, `<function>_<figure>`."""
    configured = table[(table["precision"] == precision) & (table["batch_size"] == batch_size)]
    return {
        f"{row['function']}_{figure}": int(row[figure])
        for row in configured.to_dict("records")
        for figure in ("flops", "bytes_accessed", "total_bytes")
    }
