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
    """Return FLOPs, bytes and memory as flat metrics.

    Args:
        table: as `cost_table` gives it.
        precision: of the configured training, whose functions stand as `<function>_<figure>`.
        batch_size: likewise; other variants stand as `<function>/<precision>_<batch size>/<figure>`.
    """
    figures = ("flops", "bytes_accessed", "total_bytes")
    metrics = {}
    for row in table.to_dict("records"):
        variant = f"{row['precision']}_{row['batch_size']}"
        is_configured = (row["precision"], row["batch_size"]) == (precision, batch_size)
        for figure in figures:
            metrics[f"{row['function']}/{variant}/{figure}"] = int(row[figure])
            if is_configured:
                metrics[f"{row['function']}_{figure}"] = int(row[figure])
    return metrics
