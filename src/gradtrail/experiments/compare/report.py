"""The result of a comparison: a table for a terminal and in Markdown."""

import math
import statistics
from collections.abc import Sequence

from gradtrail.experiments.compare.statistics import Summary, median
from gradtrail.support.progress import stdout_console
from gradtrail.support.significance import Difference
from gradtrail.support.tables import table

_CAPTION = (
    "Test accuracy: mean ± standard deviation over the seeds. Difference to the baseline over the seeds that both "
    "have, with its simultaneous 95 % confidence interval (paired t-test, Bonferroni); significant: the interval "
    "excludes 0. Training times are medians; × baseline: geometric mean of the ratios, with its simultaneous 95 % "
    "confidence interval, if at least two seeds have comparable times: both trained on the same kind of "
    "machine, one run at a time, within an hour and without another seed in between."
)


def table_rows(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """Return the cells of each variant, column → text, without the columns that no variant fills."""
    is_tested = any(summary.difference and summary.difference.num_pairs > 1 for summary in summaries)
    has_sizes = len({summary.runs[0].num_parameters for summary in summaries}) > 1
    rows = []
    for summary in summaries:
        corrected = [run.test_accuracy_corrected_labels for run in summary.runs]
        cells = {
            "variant": summary.variant,
            "parameters": _number(summary.runs[0].num_parameters if has_sizes else None, ",.0f"),
            "seeds": ", ".join(str(run.seed) for run in summary.runs),
            "test accuracy, %": _mean_and_spread(summary.accuracies),
            "difference, points": _difference(summary.difference),
            "verdict": summary.verdict if is_tested else "",
            "test loss": f"{statistics.mean(run.test_loss for run in summary.runs):.4f}",
            "corrected labels, %": _mean_and_spread([share for share in corrected if share is not None]),
            "training, s": _number(summary.seconds, ".1f"),
            "× baseline": time_ratio(summary.log_time_ratio),
            "compile, s": _number(median(run.compile_seconds for run in summary.runs), ".1f"),
        }
        rows.append(cells)
    return [{column: row[column] for column in rows[0] if any(other[column] for other in rows)} for row in rows]


def print_table(summaries: Sequence[Summary], title: str) -> None:
    """Print the table on a terminal, with a caption if variants are compared."""
    rows, console = table_rows(summaries), stdout_console()
    console.print(table(title, rows, right=[*rows[0]][1:]))
    if summaries[0].is_compared:
        console.print(_CAPTION, style="dim")


def as_markdown(summaries: Sequence[Summary], title: str) -> str:
    """Return a title, the table and a caption in Markdown."""
    rows = table_rows(summaries)
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    text = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in lines)
    return "\n\n".join([f"**{title}**", text, *([_CAPTION] if summaries[0].is_compared else [])]) + "\n"


def _mean_and_spread(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    spread = f" ± {100 * statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * statistics.mean(shares):.2f}{spread}"


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    ends = f" ({_end(difference.low)} to {_end(difference.high)})" if difference.has_interval else ""
    return f"{_points(difference.mean)}{ends}"


def _points(share: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    text = f"{100 * share:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", "−")


def _end(share: float) -> str:
    """Format an end of an interval, with enough digits to show its sign."""
    text = _points(share)
    return f"{100 * share:+.1g}".replace("-", "−") if text == "0.00" and share else text


def time_ratio(log_ratio: Difference | None) -> str:
    """Return the ratio of the training times to the baseline's and its interval; empty if unknown."""
    if log_ratio is None or not log_ratio.has_interval:
        return ""
    return f"{math.exp(log_ratio.mean):.2f} ({math.exp(log_ratio.low):.2f} to {math.exp(log_ratio.high):.2f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
