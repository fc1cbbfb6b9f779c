"""Figures of a profile: static costs of each variant, where the time goes, and a roofline.

A roofline shows the FLOP/s of functions below the limits of the machine (Williams et al., doi 10.1145/1498765.1498785).
"""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from gradtrail.core.profile.benchmark import MachineRates, Variant
from gradtrail.stages.common import plotting

_MARKERS = ("s", "^", "D", "v")
_COLOURS = {"train_step": plotting.BLUE, "predict": plotting.GREEN, "score": plotting.VERMILLION}
_PHASES = {
    "tracing": ("trace_seconds", plotting.ORANGE),
    "lowering": ("lower_seconds", plotting.GREEN),
    "compiling": ("compile_seconds", plotting.VERMILLION),
    "first call": ("first_call_seconds", plotting.GREY),
    "one epoch of steady calls": ("epoch_seconds", plotting.BLUE),
}
Rows = Iterable[Mapping[str, Any]]


def variant_rows(rows: Rows, configured: Variant, *, but: str = "") -> list[Mapping[str, Any]]:
    """Return the rows of the configured variant, and those that differ from it in the column `but` alone."""
    fixed = {key: value for key, value in dataclasses.asdict(configured).items() if key != but}
    return [row for row in rows if fixed.items() <= row.items()]


def draw_costs(costs: Rows, configured: Variant, title: str) -> Figure:
    """Draw FLOPs and bytes per example, and memory, of each function over the batch size; other variants as points."""
    at_most = ", at most" if any(row["data_dependent_loops"] for row in costs) else ""
    panels: dict[str, Callable[[Mapping[str, Any]], float]] = {
        f"kFLOP per example{at_most}": lambda row: row["flops"] / row["batch_size"] / 1e3,
        f"KiB read and written per example{at_most}": lambda row: row["touched_bytes"] / row["batch_size"] / 2**10,
        "temporary memory, MiB": lambda row: row["temporary_bytes"] / 2**20,
        "total memory, MiB": lambda row: row["total_bytes"] / 2**20,
    }
    figure, axes = plotting.new_figure(f"Static costs from the compiler · {title}", rows=2, columns=2, size=(11, 8))
    for axis, (label, cost_of) in zip(axes.flat, panels.items(), strict=True):
        drawn = [{**row, "drawn": cost_of(row)} for row in costs]
        _draw_over_batch_size(axis, drawn, configured)
        axis.set(title=label, xlabel="batch size", ylim=(0, 1.1 * max(1e-9, *(row["drawn"] for row in drawn))))
        axis.yaxis.set_major_formatter("{x:,g}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, loc="outside lower center", ncols=4)
    return figure


def _draw_over_batch_size(axis: Axes, rows: Rows, configured: Variant) -> None:
    for function, colour in _COLOURS.items():
        by_size = [row for row in variant_rows(rows, configured, but="batch_size") if row["function"] == function]
        by_size.sort(key=lambda row: row["batch_size"])
        sizes, values = ([row[name] for row in by_size] for name in ("batch_size", "drawn"))
        axis.plot(sizes, values, "o-", color=colour, label=function)
        alternatives = [
            *(row for row in variant_rows(rows, configured, but="precision")),
            *(row for row in variant_rows(rows, configured, but="remat")),
        ]
        alternatives = [row for row in alternatives if row["function"] == function and row not in by_size]
        for row, marker in zip(alternatives, _MARKERS, strict=False):
            form = row["precision"] if row["remat"] == configured.remat else f"remat {'on' if row['remat'] else 'off'}"
            label = f"{function}, {form}"
            axis.plot(
                row["batch_size"], row["drawn"], marker, color=colour, label=label, fillstyle="none", markersize=9
            )
    all_sizes = sorted({row["batch_size"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(all_sizes, labels=map(str, all_sizes))
    axis.minorticks_off()


def draw_times(rows: Rows, configured: Variant, title: str) -> Figure:
    """Draw the time of each function in an epoch by phase, and that of an example over the batch size."""
    figure, axes = plotting.new_figure(f"Where the time goes · {title}", columns=2, size=(13, 4))
    phases, by_size = axes[0]
    chosen = sorted(variant_rows(rows, configured), key=lambda row: [*_COLOURS].index(row["function"]))
    names = [f"{row['function']}{', from the cache' if row['cached'] else ''}" for row in chosen]
    lefts = [0.0] * len(chosen)
    for label, (column, colour) in _PHASES.items():
        widths = [
            row["steps_per_epoch"] * row["seconds"] if column == "epoch_seconds" else row[column] for row in chosen
        ]
        phases.barh(names, widths, left=lefts, color=colour, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, total in enumerate(lefts):
        phases.text(total, place, f" {total:,.3g} s", va="center")
    phases.set(title="an epoch of calls", xlabel="seconds")
    phases.invert_yaxis()
    phases.margins(x=0.15)
    phases.grid(visible=False, axis="y")
    figure.legend(*phases.get_legend_handles_labels(), loc="outside lower left", ncols=5, fontsize=9)

    drawn = [{**row, "drawn": 1e6 / row["examples_per_second"]} for row in rows]
    _draw_over_batch_size(by_size, drawn, configured)
    by_size.set(title="a steady call", xlabel="batch size", ylabel="µs per example", ylim=(0, None))
    by_size.legend(fontsize=9)
    return figure


def draw_roofline(rows: Rows, configured: Variant, rates: MachineRates, title: str) -> Figure:
    """Draw the achieved FLOP/s of each function over its arithmetic intensity, below the limits of the machine."""
    figure, axes = plotting.new_figure(f"Roofline · {title}", size=(9, 6))
    axis, drawn = axes[0, 0], [row for row in rows if row["arithmetic_intensity"] > 0]
    _draw_roof(axis, [row["arithmetic_intensity"] for row in drawn], rates)
    for row in drawn:
        place, colour = (row["arithmetic_intensity"], row["flops_per_second"]), _COLOURS[row["function"]]
        if variant_rows([row], configured):
            at_most = "at most " if row["data_dependent_loops"] else ""
            rate, share = _giga(row["flops_per_second"]), row["share_of_matmul_rate"]
            label = f"{row['function']}: {at_most}{rate}FLOP/s, {share:.0%} of the matmul rate"
            axis.plot(*place, "o", color=colour, markersize=9, label=label)
        else:
            axis.plot(*place, ".", color=colour, alpha=0.5)
    low, high = axis.get_ylim()
    axis.set_ylim(low / 2, high * 1.5)
    for scale, form in ((axis.xaxis, "{x:g}"), (axis.yaxis, lambda value, _: _giga(value))):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(form)
        scale.set_minor_locator(NullLocator())
    axis.legend(loc="lower right", fontsize=9)
    note = (
        "Large points: the configured variant; small points: other precisions, batch sizes and remat. FLOPs and bytes "
        "are the compiler's estimates. The slope is the rate of copies from memory: a point may lie above it where "
        "data stays in the caches. The limits are those of float32."
    )
    figure.supxlabel(textwrap.fill(note, 145), fontsize=8, color=plotting.GREY, x=0.02, ha="left")
    return figure


def _draw_roof(axis: Axes, intensities: Sequence[float], rates: MachineRates) -> None:
    """Draw the highest FLOP/s of the machine at each arithmetic intensity, and label the axes."""
    ridge = rates.flops_per_second / rates.bytes_per_second
    low, high = min([ridge, *intensities]) / 3, max([ridge, *intensities]) * 3
    roof = [low * rates.bytes_per_second, rates.flops_per_second, rates.flops_per_second]
    label = f"{_giga(rates.flops_per_second)}FLOP/s in matrix products, {_giga(rates.bytes_per_second)}B/s in copies"
    axis.plot([low, ridge, high], roof, color=plotting.GREY, label=label)
    axis.set(xscale="log", yscale="log", xlim=(low, high))
    axis.set(xlabel="arithmetic intensity, FLOPs per byte read or written", ylabel="FLOP/s of a steady call")


def _giga(value: float) -> str:
    """Return a rate in units of 10⁹: `98 G`, `0.52 G`."""
    return f"{value / 1e9:,.0f} G" if value >= 1e10 else f"{value / 1e9:.2g} G"
