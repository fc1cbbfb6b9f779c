"""The processes of a training: decisions of process 0, refusals in one line, and logs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import free_port

from gradtrail.stages.common import processes
from gradtrail.support.errors import UserError
from gradtrail.support.ranks import refuse_followers

# Each of three processes decides, meets the others, and finds out whether it has the same values as process 0.
WORK = """
import sys, time
from gradtrail.core.config import ConfigError
from gradtrail.stages.common import processes
from gradtrail.support.errors import UserError

index = int(sys.argv[1])
processes.join(60.0)
try:
    processes.devices(4)
except ConfigError as error:
    print(error)
devices = processes.devices(6)
print(len(devices), [device.process_index for device in devices])
for value in (None, 0.1 + 0.2, ["a", 3], {"loss": float("inf")}):
    assert processes.agreed(lambda: value if index == 0 else 1 / 0) == value
time.sleep(0.3 * index)
processes.wait_for_all()
processes.require_same({"params": "same"})
try:
    processes.require_same({"params": str(index // 2)})
except UserError as error:
    print(error)
assert processes.is_connected()
processes.leave()
assert not processes.is_connected()
assert processes.agreed(lambda: index) == index
"""


def test_process_0_decides_for_all_and_the_shards_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    workers = []
    for index in ("0", "1", "2"):
        monkeypatch.setenv("JAX_PROCESS_ID", index)
        command = [sys.executable, "-c", WORK, index]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    outputs = [worker.communicate(timeout=100)[0].splitlines() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    divided = [
        "train.shards must be a multiple of the number of processes, 3, got 4",
        "6 [0, 0, 1, 1, 2, 2]",
    ]
    assert outputs[:2] == [divided] * 2
    assert outputs[2][:2] == divided
    (line,) = outputs[2][2:]
    assert line.startswith("params differs from that of process 0, on ")


def test_process_without_variables_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.join(1.0)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    processes.join(1.0)
    assert not processes.is_connected()
    assert processes.agreed(lambda: 5) == 5
    processes.wait_for_all()
    processes.leave()
    with pytest.raises(SystemExit):
        processes.exit_with(2)


def test_variables_that_do_not_describe_the_processes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(UserError, match=r"^JAX_COORDINATOR_ADDRESS, .*: invalid literal .* 'two'$"):
        processes.join(1.0)


def test_stage_of_one_process_refuses_several(monkeypatch: pytest.MonkeyPatch) -> None:
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
    waits: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes.time, "sleep", waits.append)
    line = processes.describe_fault(ZeroDivisionError("division\nby zero"))
    assert line.startswith("ZeroDivisionError: division by zero; its traceback is in /")
    assert line.endswith("/.gradtrail/processes/0.log")
    assert not waits
    processes.describe_fault(ValueError("Gloo AllGather failed: Connection reset by peer"))
    assert waits == [20]
