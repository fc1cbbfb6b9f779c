"""Figures of measured times: steps with and without jit, batch sizes, precision and remat, rooflines, times by phase.

A roofline shows the FLOP/s of functions below the limits of the machine (Williams et al., doi 10.1145/1498765.1498785).
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from gradtrail.core.profile.benchmark import MachineRates, StepTimes
from gradtrail.core.profile.variants import Variant
from gradtrail.stages.artifacts import plotting
from gradtrail.stages.profile.figures import FUNCTIONS, forms_to_compare, set_batch_sizes
from gradtrail.stages.profile.tables import configured_rows


def draw_steps(steps: StepTimes, title: str) -> Figure:
    """Draw the elapsed time over the steps made, in three ways, and the step at which compilation has paid off."""
    figure, axes = plotting.new_figure(f"Training steps with and without jit · {title}", size=(9, 5))
    axis, pays = axes[0, 0], steps.steps_until_it_pays
    last = max(100, 1.4 * pays) if np.isfinite(pays) else 100
    ways = {
        f"without jit: {_seconds(steps.without_jit)} per step": (0.0, steps.without_jit, plotting.VERMILLION),
        f"jit, one call per step: {_seconds(steps.one_by_one)}": (
            steps.compile_seconds,
            steps.one_by_one,
            plotting.BLUE,
        ),
        f"jit, loop on the device: {_seconds(steps.scanned)}": (steps.compile_seconds, steps.scanned, plotting.GREEN),
    }
    for label, (before, pace, colour) in ways.items():
        axis.plot([0, last], [before, before + last * pace], color=colour, label=label)
    if np.isfinite(pays):
        place = pays, steps.compile_seconds + pays * steps.one_by_one
        label = f"compilation pays off after {pays:,.0f} steps; each is {steps.jit_speedup:,.1f} times faster"
        axis.plot(*place, "o", color=plotting.GREY, label=label)
    axis.set(xlabel="training steps", ylabel="elapsed seconds", xlim=(0, last), ylim=(0, None))
    axis.legend(loc="upper left")
    _note(
        figure,
        f"Lines extrapolate medians: of {steps.steps_without_jit} steps without jit, and of rounds of "
        f"{steps.steps_with_jit} steps with jit. Lines with jit start after {_seconds(steps.compile_seconds)} of "
        "tracing, lowering and compiling. The first step without jit, which compiles each operation by itself, is left "
        "out.",
    )
    return figure


def draw_batch_sizes(functions: pd.DataFrame, doubling: pd.DataFrame, configured: Variant, title: str) -> Figure:
    """Draw throughput and memory of the training step over the batch size, and the factors of each doubling."""
    figure, axes = plotting.new_figure(f"Batch size of the training step · {title}", columns=3, size=(13, 4.4))
    table = configured_rows(functions, configured, but="batch_size").sort_values("batch_size")
    steps, doubled = (rows[rows["function"] == "train_step"] for rows in (table, doubling))
    panels = {"examples_per_second": "throughput, examples/s", "temporary_mib": "temporary memory, MiB"}
    for axis, (column, label) in zip(axes[0], panels.items(), strict=False):
        axis.plot(steps["batch_size"], steps[column], "o-", color=FUNCTIONS["train_step"])
        chosen = steps[steps["batch_size"] == configured.batch_size]
        axis.plot(chosen["batch_size"], chosen[column], "o", color=plotting.ORANGE, markersize=9, label="configured")
        axis.set(title=label, xlabel="batch size", ylim=(0, 1.15 * steps[column].max()))
        set_batch_sizes(axis, steps["batch_size"])
    axes[0, 0].yaxis.set_major_formatter("{x:,.0f}")
    axes[0, 0].legend(loc="lower right")
    _draw_doubling(axes[0, 2], doubled)
    return figure


def draw_forms(functions: pd.DataFrame, configured: Variant, title: str) -> Figure:
    """Draw throughput and memory at the configured batch size, for each precision and with remat on and off."""
    heading = f"Precision and remat, batch size {configured.batch_size} · {title}"
    figure, axes = plotting.new_figure(heading, columns=2, size=(11, 4.6))
    rows = forms_to_compare(functions, configured)
    forms = list(dict.fromkeys(rows["form"]))
    height = 0.8 / len(forms)
    panels = {"examples_per_second": "examples/s", "temporary_mib": "temporary memory, MiB"}
    for axis, (column, label) in zip(axes[0], panels.items(), strict=True):
        for index, form in enumerate(forms):
            part = rows[rows["form"] == form]
            places = [list(FUNCTIONS).index(name) + (index + 0.5) * height - 0.4 for name in part["function"]]
            colour = plotting.CYCLE[index % len(plotting.CYCLE)]
            drawn = axis.barh(places, part[column], height, color=colour, label=form)
            axis.bar_label(drawn, fmt="{:,.0f}" if rows[column].max() >= 10 else "{:,.2f}", fontsize=8, padding=3)
        axis.set_yticks(range(len(FUNCTIONS)), labels=FUNCTIONS)
        axis.set(title=label)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.grid(visible=False, axis="y")
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter("{x:,.0f}" if rows[column].max() >= 10 else "{x:,.2f}")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(forms))
    return figure


def draw_roofline(functions: pd.DataFrame, configured: Variant, rates: MachineRates, title: str) -> Figure:
    """Draw the achieved FLOP/s of each function over its arithmetic intensity, below the limits of the machine."""
    figure, axes = plotting.new_figure(f"Roofline · {title}", size=(9, 6))
    axis, table = axes[0, 0], functions[functions["arithmetic_intensity"] > 0]
    _draw_roof(axis, table["arithmetic_intensity"].tolist(), rates)
    chosen = configured_rows(table, configured, but="")
    for function, colour in FUNCTIONS.items():
        other_rows = table[(table["function"] == function) & ~table.index.isin(chosen.index)]
        axis.plot(other_rows["arithmetic_intensity"], other_rows["flops_per_second"], ".", color=colour, alpha=0.5)
        for row in chosen[chosen["function"] == function].to_dict("records"):
            place = row["arithmetic_intensity"], row["flops_per_second"]
            axis.plot(*place, "o", color=colour, markersize=9, label=_rate_label(row))
            axis.annotate(function, place, (0, -16), textcoords="offset points", ha="center", va="top", color=colour)
    _finish_axes(axis)
    axis.legend(loc="lower right", fontsize=9)
    _note(
        figure,
        "Large points: the configured variant; small points: other precisions, batch sizes and remat. FLOPs and bytes "
        "are the compiler's estimates. The slope is the rate of copies from memory: a point may lie above it where "
        "data stays in the caches. The limits are those of float32.",
    )
    return figure


def draw_times(times: pd.DataFrame, title: str) -> Figure:
    """Draw the time of each function in an epoch: tracing, lowering, compiling, first call, steady calls."""
    pieces = [column for column in times if column not in ("function", "calls")]
    figure, axes = plotting.new_figure(f"Where the time goes · {title}", size=(9, 3.8))
    axis, left = axes[0, 0], np.zeros(len(times))
    colours = (plotting.ORANGE, plotting.GREEN, plotting.VERMILLION, plotting.GREY, plotting.BLUE)
    for piece, colour in zip(pieces, colours, strict=True):
        label = f"one epoch: {times['calls'].max():,} steady calls" if piece == pieces[-1] else piece
        axis.barh(times["function"], times[piece], left=left, color=colour, label=label)
        left = left + times[piece].to_numpy()
    for place, total in enumerate(left):
        axis.text(total, place, f" {_seconds(total)}", va="center")
    axis.set(xlabel="seconds")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _draw_doubling(axis: Axes, doubling: pd.DataFrame) -> None:
    """Draw the factors of time and of memory side by side for each doubling."""
    bars = {"seconds": ("step time", plotting.BLUE), "temporary_mib": ("temporary memory", plotting.GREY)}
    for index, (column, (label, colour)) in enumerate(bars.items()):
        places = [place + 0.4 * (index - 0.5) for place in range(len(doubling))]
        drawn = axis.bar(places, doubling[column], 0.38, color=colour, label=label)
        axis.bar_label(drawn, fmt="{:.2f}", fontsize=8, padding=2)
    axis.axhline(2, color=plotting.VERMILLION, linestyle="--", linewidth=1, label="×2: throughput stays the same")
    axis.set_xticks(range(len(doubling)), labels=[f"{size:g} → {2 * size:g}" for size in doubling["batch_size"]])
    axis.set(
        title="factor per doubling of the batch",
        xlabel="batch size",
        ylim=(0, 1.4 * np.nanmax([2.2, *doubling["seconds"], *doubling["temporary_mib"]])),
    )
    axis.grid(visible=False, axis="x")
    axis.legend(loc="upper left", fontsize=8)


def _note(figure: Figure, text: str) -> None:
    """Add a note below a figure."""
    figure.supxlabel(textwrap.fill(text, 145), fontsize=8, color=plotting.GREY, x=0.02, ha="left")


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:,.0f} µs"
    return f"{1e3 * value:,.3g} ms" if value < 1 else f"{value:,.2f} s"


def write_function_roofline(path: Path, functions: pd.DataFrame, rates: MachineRates, title: str) -> None:
    """Write a roofline with a point for each function to a PNG; nothing if no function has one.

    Args:
        functions: columns `function`, `arithmetic_intensity`, `flops_per_second`, `share_of_matmul_rate` and
            `data_dependent_loops`; rows that were not timed, or access or compute nothing, are left out.
    """
    drawn = functions[(functions["arithmetic_intensity"] > 0) & (functions["flops_per_second"] > 0)]
    if drawn.empty:
        return
    figure, axes = plotting.new_figure(f"Roofline · {title}", size=(9, 6))
    _draw_roof(axes[0, 0], drawn["arithmetic_intensity"].tolist(), rates)
    for index, row in enumerate(drawn.to_dict("records")):
        colour, marker = plotting.CYCLE[index % len(plotting.CYCLE)], "os^D"[index // len(plotting.CYCLE) % 4]
        place = row["arithmetic_intensity"], row["flops_per_second"]
        axes[0, 0].plot(*place, marker, color=colour, label=_rate_label(row))
    _finish_axes(axes[0, 0])
    axes[0, 0].legend(loc="lower right", fontsize=9)
    plotting.save(figure, path)


def _rate_label(row: Mapping[Any, Any]) -> str:
    """Return the legend's label of a function: its FLOP/s and their share of the machine's rate."""
    most = "at most " if row["data_dependent_loops"] else ""
    rate, share = _giga(row["flops_per_second"]), row["share_of_matmul_rate"]
    return f"{row['function']}: {most}{rate}FLOP/s, {share:.0%} of the matmul rate"


def _draw_roof(axis: Axes, intensities: Sequence[float], rates: MachineRates) -> None:
    """Draw the highest FLOP/s of the machine at each arithmetic intensity, and label the axes."""
    ridge = rates.flops_per_second / rates.bytes_per_second
    low, high = min([ridge, *intensities]) / 3, max([ridge, *intensities]) * 3
    roof = [low * rates.bytes_per_second, rates.flops_per_second, rates.flops_per_second]
    label = f"{_giga(rates.flops_per_second)}FLOP/s in matrix products, {_giga(rates.bytes_per_second)}B/s in copies"
    axis.plot([low, ridge, high], roof, color=plotting.GREY, label=label)
    axis.set(xscale="log", yscale="log", xlim=(low, high))
    axis.set(xlabel="arithmetic intensity, FLOPs per byte read or written", ylabel="FLOP/s of a steady call")


def _finish_axes(axis: Axes) -> None:
    """Fit the axes to everything drawn, with few ticks in plain numbers."""
    axis.set_ylim(axis.get_ylim()[0] / 2, axis.get_ylim()[1] * 1.5)
    for scale, form in ((axis.xaxis, "{x:g}"), (axis.yaxis, lambda value, _: _giga(value))):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(form)
        scale.set_minor_locator(NullLocator())


def _giga(value: float) -> str:
    """Return a rate in units of 10⁹: `98 G`, `0.52 G`."""
    return f"{value / 1e9:,.0f} G" if value >= 1e10 else f"{value / 1e9:.2g} G"
