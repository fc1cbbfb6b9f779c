"""Pictures of static costs: what each function computes, moves and holds, by batch size and precision."""

from pathlib import Path

import pandas as pd

from gradtrail.io.figures import style


def draw(path: Path, costs: pd.DataFrame, title: str) -> None:
    """Draw FLOPs, bytes accessed and memory of each function over the batch size."""
    columns = {"flops": "FLOPs a batch", "bytes_accessed": "bytes accessed a batch", "total_bytes": "memory in bytes"}
    figure, axes = style.new_figure(f"Static costs by the compiler · {title}", columns=3, size=(13, 4.2))
    colours = dict(zip(sorted(costs["function"].unique()), style.CYCLE, strict=False))
    for axis, (column, label) in zip(axes.flat, columns.items(), strict=True):
        for (function, precision), part in costs.groupby(["function", "precision"]):
            dashed = "-" if precision == "float32" else "--"
            axis.plot(
                part["batch_size"],
                part[column],
                dashed,
                marker="o",
                color=colours[function],
                label=f"{function} {precision}",
            )
        axis.set(xscale="log", yscale="log", xlabel="batch size", title=label)
        axis.set_xticks(sorted(costs["batch_size"].unique()), labels=map(str, sorted(costs["batch_size"].unique())))
        axis.minorticks_off()
    axes[0, 0].legend(fontsize=8)
    style.save(figure, path)
