"""Figures of static costs: FLOPs, bytes and memory of each function in each variant.

Drawn from a table with a row for each function of each variant; see `tables.cost_table`.
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradtrail.core.profile.variants import Variant
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.profile.tables import configured_rows

_MARKERS = ("s", "^", "D", "v")
FUNCTIONS = {"train_step": plotting.BLUE, "predict": plotting.GREEN, "score": plotting.VERMILLION}


def draw(folder: Path, costs: pd.DataFrame, configured: Variant, title: str) -> None:
    """Draw all figures of the `profile` stage into a folder."""
    plotting.save(draw_costs(costs, configured, title), folder / "costs.png")


def draw_costs(costs: pd.DataFrame, configured: Variant, title: str) -> Figure:
    """Draw FLOPs and bytes per example, and memory, of each function over the batch size; other variants as points."""
    most = ", at most" if costs["data_dependent_loops"].any() else ""
    columns = {
        f"kFLOP per example{most}": costs["flops"] / costs["batch_size"] / 1e3,
        f"KiB read and written per example{most}": costs["touched_bytes"] / costs["batch_size"] / 2**10,
        "temporary memory, MiB": costs["temporary_bytes"] / 2**20,
        "total memory, MiB": costs["total_bytes"] / 2**20,
    }
    figure, axes = plotting.new_figure(f"Static costs from the compiler · {title}", rows=2, columns=2, size=(11, 8))
    for axis, (label, values) in zip(axes.flat, columns.items(), strict=True):
        _draw_over_batch_size(axis, costs.assign(drawn=values), configured)
        axis.set(title=label, xlabel="batch size", ylim=(0, 1.1 * max(values.max(), 1e-9)))
        axis.yaxis.set_major_formatter("{x:,g}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, loc="outside lower center", ncols=4)
    return figure


def forms_to_compare(table: pd.DataFrame, configured: Variant) -> pd.DataFrame:
    """Return the rows at the configured batch size, the configured variant first; the column `form` names each."""
    rows = pd.concat([configured_rows(table, configured, but=""), _other_forms(table, configured)])
    labels = [_form_label(row, configured) or f"configured: {configured.precision}" for row in rows.to_dict("records")]
    return rows.assign(form=labels)


def _other_forms(table: pd.DataFrame, configured: Variant) -> pd.DataFrame:
    """Return the rows at the configured batch size with another precision or remat."""
    same_batch = table[table["batch_size"] == configured.batch_size]
    return same_batch[(same_batch["precision"] != configured.precision) | (same_batch["remat"] != configured.remat)]


def _form_label(row: dict, configured: Variant) -> str:
    """Return how a row differs from the configured variant, batch size aside."""
    if row["remat"] != configured.remat:
        return "with remat" if row["remat"] else "without remat"
    return "" if row["precision"] == configured.precision else str(row["precision"])


def set_batch_sizes(axis: Axes, batch_sizes: pd.Series) -> None:
    """Make the x axis logarithmic, with a tick at each batch size."""
    sizes = sorted(batch_sizes.unique())
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, labels=map(str, sizes))
    axis.minorticks_off()


def _draw_over_batch_size(axis: Axes, table: pd.DataFrame, configured: Variant) -> None:
    for function, colour in FUNCTIONS.items():
        rows = table[table["function"] == function]
        line = configured_rows(rows, configured, but="batch_size").sort_values("batch_size")
        axis.plot(line["batch_size"], line["drawn"], "o-", color=colour, label=function)
        for row, marker in zip(_other_forms(rows, configured).to_dict("records"), _MARKERS, strict=False):
            label = f"{function}, {_form_label(row, configured)}"
            axis.plot(
                row["batch_size"], row["drawn"], marker, color=colour, label=label, fillstyle="none", markersize=9
            )
    set_batch_sizes(axis, table["batch_size"])
