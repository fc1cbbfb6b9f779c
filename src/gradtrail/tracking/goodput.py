"""Shows the goodput of a training on its run; not in the report, whose bytes are the same on every machine."""

import sys
from collections.abc import Mapping, Sequence

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from gradtrail.stages.common import plotting
from gradtrail.stages.common.pipeline_file import TRAIN
from gradtrail.support.goodput import Attempt, seconds_by_cause
from gradtrail.tracking.names import metric_name
from gradtrail.tracking.record import Record

_COLORS = (  # cause → color, in the order of the bar
    {"steps": plotting.BLUE, "validation": "#56B4E9", "data_loading": "#F0E442"}
    | {"checkpoint_save": plotting.GREEN, "checkpoint_restore": "#7FCEB9"}
    | {"wasted_progress": plotting.VERMILLION, "idle": plotting.ORANGE}
    | {"imports": "#8C5A7B", "preparation": "#CC79A7", "compile": "#E5BCD3"}
    | {"tracking": plotting.GREY, "other": "#BDBDBD"}
)


def add_goodput(record: Record, attempts: Sequence[Attempt], title: str, price_per_hour: float | None) -> None:
    """Add goodput, what kills took and the price of all attempts as metrics, all causes as a figure.

    After several attempts, print a line.
    """
    measured = seconds_by_cause(attempts)
    total, seconds = sum(measured.values()), {cause: value for cause, value in measured.items() if value >= 0.05}
    if "steps" not in seconds:  # a script in place of the training
        return
    lost = {f"seconds_{cause}": seconds[cause] for cause in ("wasted_progress", "idle") if cause in seconds}
    values = {"goodput": seconds["steps"] / total} | lost
    if price_per_hour:
        values["cost"] = price_per_hour * (total - seconds.get("idle", 0.0)) / 3600
    record.add_points({metric_name(TRAIN, key): {None: value} for key, value in values.items()})
    heading = f"goodput {values['goodput']:.0%} of {total:,.1f} s, attempts: {len(attempts)}"
    plotting.save(draw(seconds, f"{heading.capitalize()} · {title}"), record.artifacts / "goodput.png")
    if len(attempts) > 1:
        print(f"{TRAIN}: {heading}", file=sys.stderr)


def draw(seconds: Mapping[str, float], title: str) -> Figure:
    """Draw the seconds by cause as one bar, with shares and a legend."""
    figure, axes = plotting.new_figure(title, size=(10, 2.2))
    axis, left, total = axes[0, 0], 0.0, sum(seconds.values())
    for cause in filter(seconds.get, _COLORS):
        color, value, name = _COLORS[cause], seconds[cause], cause.replace("_", " ")
        bar = axis.barh(0, value, left=left, color=color, edgecolor="white", label=f"{name} {value:,.1f} s")
        share = f"{value / total:.0%}" if value > 0.03 * total else ""  # else it would not fit
        axis.bar_label(bar, [share], label_type="center", color="white" if sum(to_rgb(color)) < 1.5 else "black")
        left += value
    axis.set_xlim(0, total)
    axis.set_axis_off()
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure
