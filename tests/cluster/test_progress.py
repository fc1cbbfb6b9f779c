"""State a job does is one line a step in a pipe; who failed is told with its reason."""

import pytest

from gradtrail.cluster.events import Event
from gradtrail.cluster.progress import show

LABELS = {"gradtrail-1": "low, seed 0", "gradtrail-2": "high, seed 0"}


def event(name: str, state: str, detail: str = "", attempt: int = 0) -> Event:
    return Event(name=name, state=state, seconds=1.0, detail=detail, attempt=attempt)  # type: ignore[arg-type]


def test_pipe_gets_one_line_per_step_and_the_reasons_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        event("gradtrail-1", "waiting"),
        None,
        event("gradtrail-1", "running", "node abc"),
        event("gradtrail-1", "running", "node def", 1),
        event("gradtrail-2", "there"),
        event("of another command", "made"),
        event("gradtrail-1", "failed", "train: \x1b[31mno"),
    ]
    assert show("rates", events, LABELS) == {"gradtrail-1": "train: \x1b[31mno"}
    assert capsys.readouterr().err.splitlines() == [
        "rates: low, seed 0: waiting",
        "rates: low, seed 0: running (node abc)",
        "rates: low, seed 0: running (node def, attempt 2)",
        "rates: high, seed 0: done before (1 of 2)",
        "rates: low, seed 0: failed: train: \\x1b[31mno (2 of 2)",
    ]
