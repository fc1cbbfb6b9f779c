"""The processes of a training: agreements, refusals in one line, and logs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradtrail.stages.common import processes
from gradtrail.stages.common.processes import ALONE, Processes, join
from gradtrail.support.errors import UserError
from gradtrail.support.ranks import refuse_followers


class Client:
    """Stands for JAX's client of the coordination service: keys and values, shared by all processes."""

    def __init__(self) -> None:
        self.values = dict[str, str]()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if key not in self.values:
            raise RuntimeError("UNAVAILABLE: process 0 is gone")
        return self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


def pair() -> tuple[Processes, Processes]:
    client = Client()
    return Processes(0, 2, client), Processes(1, 2, client)


def never() -> Any:
    raise AssertionError("process 0 alone decides")


def test_process_0_decides_and_the_others_get_the_same_values() -> None:
    first, second = pair()
    for value in (None, 0.1 + 0.2, ["a", 3], {"loss": float("inf")}):
        assert first.agreed(lambda: value) == value  # noqa: B023
        assert second.agreed(never) == value
    assert first.in_first_process(lambda x: x + 1)(2) == 3
    assert second.in_first_process(never)(2) == 3
    assert ALONE.agreed(lambda: 5) == 5


def test_signal_of_another_process_reaches_process_0() -> None:
    first, second = pair()
    assert first.asked_to_stop() is None
    second.ask_to_stop(15)
    assert first.asked_to_stop() == 15
    assert ALONE.asked_to_stop() is None


def test_process_without_variables_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join(1.0) is ALONE
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert join(1.0) is ALONE
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(UserError, match="must be whole numbers, got 'two'"):
        join(1.0)
    with pytest.raises(ValueError, match="two"):
        refuse_followers("evaluate")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(UserError, match=r"^JAX_NUM_PROCESSES is 2, but stage evaluate runs in one process$"):
        refuse_followers("evaluate")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(SystemExit):
        refuse_followers("evaluate")


PRINTS = """
import os, sys
from gradtrail.stages.common.processes import write_log
write_log()
print("from Python", file=sys.stderr)
os.write(2, b"from C++\\n")
"""


@pytest.mark.parametrize(("index", "terminal"), [("0", "from Python\n"), ("1", "")])
def test_terminal_shows_process_0_and_logs_have_library_output(
    index: str, terminal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PROCESS_ID", index)
    command = [sys.executable, "-c", PRINTS]
    done = subprocess.run(command, cwd=tmp_path, check=True, stderr=subprocess.PIPE, text=True)
    assert done.stderr == terminal
    log = (tmp_path / f".gradtrail/processes/{index}.log").read_text()
    assert log == ("from C++\n" if terminal else "from Python\nfrom C++\n")


def test_fault_of_lost_process_waits_for_heartbeat_and_bug_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waits: list[float] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes.time, "sleep", waits.append)
    line = pair()[0].describe(ZeroDivisionError("division\nby zero"))
    assert line.startswith("ZeroDivisionError: division by zero; its traceback is in /")
    assert line.endswith("/.gradtrail/processes/0.log")
    assert not waits
    pair()[0].describe(ValueError("Gloo AllGather failed: Connection reset by peer"))
    assert waits == [20]
