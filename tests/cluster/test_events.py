"""Events of a job are read back from its log, among other lines, as far as they are complete."""

from gradtrail.cluster.events import Event, events_in

FIRST = Event(name="gradtrail-1", state="running", seconds=1.5, detail="node abc", attempt=2)
LAST = Event(name="", state="refused", seconds=2.0, detail="no such thing")


def test_events_are_read_from_a_log() -> None:
    log = f"a warning of Ray\n{FIRST.line()}\nnoise\n{LAST.line()}\n"
    assert list(events_in(log)) == [FIRST, LAST]


def test_incomplete_line_is_not_read() -> None:
    log = f"{FIRST.line()}\n{LAST.line()}"
    assert list(events_in(log)) == [FIRST]
    assert list(events_in(log[:-5])) == [FIRST]
