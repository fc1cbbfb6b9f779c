"""Shows the progress of a job: one table on a terminal, one line per step in a pipe or a log."""

import sys
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradtrail.cluster.events import ENDED, Event
from gradtrail.support.errors import printable
from gradtrail.support.tables import table

_MOST_ROWS = 40  # rows of the table; the experiments that ended first are left out
_STYLES = {"failed": "red", "running": "cyan", "made": "green", "there": "green", "unchanged": "green"}
_WORDS = {"made": "done", "there": "done before", "unchanged": "the commit itself"}


def show(title: str, events: Iterable[Event | None], labels: Mapping[str, str]) -> dict[str, str]:
    """Show the events of a job until they end.

    Args:
        title: Title of the table, and prefix of each line.
        events: Events of the job; None if nothing happened for a second.
        labels: Name of an experiment → its name in messages.

    Returns:
        The reason of each failure, by the name of the experiment.
    """
    last: dict[str, Event] = {}
    is_terminal = sys.stderr.isatty()
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        for event in events:
            if event is None or event.name not in labels:
                continue
            if not is_terminal and last.get(event.name) != event:
                last[event.name] = event
                print(f"{title}: {_line(event, labels, last)}", file=sys.stderr, flush=True)
            last[event.name] = event
            if is_terminal:
                live.update(_table(title, last, labels), refresh=True)
    return {name: event.detail for name, event in last.items() if event.state == "failed"}


def _line(event: Event, labels: Mapping[str, str], last: Mapping[str, Event]) -> str:
    count = f" ({_num_ended(last)} of {len(labels)})" if event.state in ENDED else ""
    again = f", attempt {event.attempt + 1}" if event.attempt else ""
    detail = f": {event.detail}" if event.state == "failed" else f" ({event.detail}{again})" if event.detail else ""
    return printable(f"{labels[event.name]}: {_WORDS.get(event.state, event.state)}{detail}{count}")


def _table(title: str, last: Mapping[str, Event], labels: Mapping[str, str]) -> Table:
    by_age = sorted(last.values(), key=lambda event: (event.state not in ENDED, event.seconds))
    names = {event.name for event in by_age[-_MOST_ROWS:]}
    rows: list[dict[str, str | Text]] = [
        {
            "experiment": Text(printable(labels[name])),
            "state": Text(_WORDS.get(event.state, event.state), style=_STYLES.get(event.state, "")),
            "where, or why": Text(printable(event.detail)),
            "attempt": str(event.attempt + 1) if event.attempt else "",
            "after": f"{event.seconds:.0f} s",
        }
        for name, event in last.items()
        if name in names
    ]
    return table(f"{title}: {_num_ended(last)} of {len(labels)} done", rows, right=("attempt", "after"))


def _num_ended(last: Mapping[str, Event]) -> int:
    return sum(event.state in ENDED for event in last.values())
