"""The roofline: what functions achieve under what the machine can do (Williams et al., doi 10.1145/1498765.1498785)."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from gradtrail.core.machine_rates import MachineRates
from gradtrail.io.figures import style


def draw(path: Path, functions: pd.DataFrame, rates: MachineRates, title: str) -> None:
    """Draw a point for each function.

    Args:
        functions: columns `function`, `arithmetic_intensity`, `flops_per_second` and `share_of_matmul_rate`; rows that
            were not timed, or access or compute nothing, are left out.
    """
    drawn = functions[(functions["arithmetic_intensity"] > 0) & (functions["flops_per_second"] > 0)]
    if drawn.empty:
        return
    figure, axes = style.new_figure(f"Roofline · {title}", size=(9, 6))
    draw_roof(axes[0, 0], drawn["arithmetic_intensity"].tolist(), rates)
    for place, row in enumerate(drawn.to_dict("records")):
        colour, marker = style.CYCLE[place % len(style.CYCLE)], "os^D"[place // len(style.CYCLE) % 4]
        share = f"{row['share_of_matmul_rate']:.0%} of the matrix rate"
        label = f"{row['function']}: {giga(row['flops_per_second'])}FLOP/s, {share}"
        axes[0, 0].plot(row["arithmetic_intensity"], row["flops_per_second"], marker, color=colour, label=label)
    finish_axes(axes[0, 0])
    axes[0, 0].legend(loc="lower right", fontsize=9)
    style.save(figure, path)


def draw_roof(axis: Axes, intensities: Sequence[float], rates: MachineRates) -> None:
    """Draw what the machine can do at each arithmetic intensity, and label the axes."""
    ridge = rates.flops_per_second / rates.bytes_per_second
    low, high = min([ridge, *intensities]) / 3, max([ridge, *intensities]) * 3
    roof = [low * rates.bytes_per_second, rates.flops_per_second, rates.flops_per_second]
    label = f"{giga(rates.flops_per_second)}FLOP/s of matrix products, {giga(rates.bytes_per_second)}B/s of copies"
    axis.plot([low, ridge, high], roof, color=style.GREY, label=label)
    axis.set(xscale="log", yscale="log", xlim=(low, high))
    axis.set(xlabel="arithmetic intensity, FLOPs a byte read or written", ylabel="FLOP/s of the steady call")


def finish_axes(axis: Axes) -> None:
    """Fit the axes to all that was drawn, with few ticks in plain numbers."""
    axis.set_ylim(axis.get_ylim()[0] / 2, axis.get_ylim()[1] * 1.5)
    for scale, form in ((axis.xaxis, "{x:g}"), (axis.yaxis, lambda value, _: giga(value))):
        scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(form)
        scale.set_minor_locator(NullLocator())


def giga(value: float) -> str:
    """Return a rate in units of 10⁹: `98 G`, `0.52 G`."""
    return f"{value / 1e9:,.0f} G" if value >= 1e10 else f"{value / 1e9:.2g} G"
