"""The launcher: every process is told its number, one status, and no process outlives the others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from projects import ROOT

from gradtrail.cluster.launch import launch
from gradtrail.support.errors import UserError
from gradtrail.support.ranks import is_follower

_LAUNCH = """
import contextlib, io, json, os, sys
from gradtrail.cluster import launch
launch._GRACE_SECONDS, launch._ABORT_SECONDS = 0.5, 0.3
results = {}
for folder, (count, command) in json.loads(sys.argv[1]).items():
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            launch.main.callback(count, command)
        except SystemExit as ended:
            results[os.path.basename(folder)] = [ended.code, stderr.getvalue()]
print(json.dumps(results))
"""
AGAIN = "; `dvc repro` resumes from the last checkpoint, if there is one"
LOG = "mkdir -p .gradtrail/processes; exec 2> .gradtrail/processes/$JAX_PROCESS_ID.log; "
JAX_ABORTS = LOG + 'echo "JAX distributed service detected fatal errors. {}" >&2; kill -6 $$'
UNHEALTHY = JAX_ABORTS.format("The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks")
HEARTBEAT = JAX_ABORTS.format("RPC: /xla.coordination.CoordinationService/Heartbeat")
REGISTER = JAX_ABORTS.format("RPC: /xla.coordination.CoordinationService/RegisterTask")
TOLD = 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES" >> told; echo "$JAX_COORDINATOR_ADDRESS" > "at$JAX_PROCESS_ID"'
CASES = {  # what processes 0, 1, … do, or the only one on its host; the status and the line of the launcher
    "no failure": ([TOLD] * 3, 0, ""),
    "first failed": (["exit 3", "exec sleep 60"], 3, ""),  # process 0 has described its fault
    "other failed": (["exec sleep 60", "exit 5"], 5, "process 1 ended with status 5"),
    "logged": (["exec sleep 60", LOG + "echo train: a is missing >&2; exit 2"], 2, "process 1: a is missing"),
    "asked to stop": (["sleep 0.2; exit 143", "exit 143"], 143, ""),
    "all terminated": (["kill -TERM $$", "kill -TERM $$"], 143, "process 0 was killed by SIGTERM" + AGAIN),
    "first killed": (["kill -9 $$", "exec sleep 60"], 2, "process 0 was killed by SIGKILL" + AGAIN),
    "other killed": ([HEARTBEAT, "kill -9 $$"], 2, "process 1 was killed by SIGKILL" + AGAIN),
    "other aborted": (["exec sleep 60", "kill -6 $$"], 2, "process 1 was killed by SIGABRT" + AGAIN),
    "other stopped": ([UNHEALTHY, "kill -STOP $$"], 2, "process 1 stopped responding" + AGAIN),
    "first stopped": (["kill -STOP $$", HEARTBEAT], 2, "process 0 stopped responding" + AGAIN),
    "not joined": ([REGISTER, "kill -STOP $$"], 2, "process 1 did not connect within `runtime.join_seconds`"),
    "first exited": (["exit 2", HEARTBEAT], 2, ""),
    "of another host": ([UNHEALTHY], 2, "process 1 stopped responding" + AGAIN),
}
Launched = tuple[Path, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The folders of the cases, and what became of each: the launcher needs a process without threads."""
    root = tmp_path_factory.mktemp("launched")
    commands: dict[str, tuple[int | None, list[str]]] = {str(root): (2, ["/no/such"])}
    for case, (scripts, *_) in CASES.items():
        (root / case).mkdir()
        for index, script in enumerate(scripts):
            (root / case / str(index if scripts[1:] else 3)).write_text(script)
        command = ["sh", "-c", ". ./$JAX_PROCESS_ID", "pipeline.train"]
        commands[str(root / case)] = len(scripts) if scripts[1:] else None, command
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PROCESS_ID": "3"}
    words = [sys.executable, "-c", _LAUNCH, json.dumps(commands)]
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    assert not done.stderr
    return root, json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_process_that_failed_is_named_in_one_line(case: str, launched: Launched) -> None:
    _, status, line = CASES[case]
    assert launched[1][case] == [status, f"train: {line}\n" if line else ""]


def test_processes_get_their_index_and_a_common_address(launched: Launched) -> None:
    folder = launched[0] / "no failure"
    assert sorted((folder / "told").read_text().splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]
    addresses = {(folder / f"at{index}").read_text() for index in range(3)}
    assert len(addresses) == 1
    assert addresses.pop().startswith("127.0.0.1:")


def test_missing_command_is_one_line(launched: Launched) -> None:
    root, results = launched
    assert results[root.name] == [2, "launch: /no/such: No such file or directory\n"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_ends_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    script = f'trap "echo >> {tmp_path}/got; exit 7" TERM; echo >> {tmp_path}/ready; while :; do sleep 0.05; done'
    command = [sys.executable, "-m", "gradtrail.cluster.launch", "-n", "2", "sh", "-c", script]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    while not (tmp_path / "ready").is_file() or len((tmp_path / "ready").read_text()) < 2:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.wait(30) == (7 if number == signal.SIGTERM else -number)
    gone, left = psutil.wait_procs(children, 30)
    assert not left
    assert len(gone) == 2
    assert len((tmp_path / "got").read_text()) == 2


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_count_out_of_bounds_is_one_line(count: int) -> None:
    with pytest.raises(UserError, match=rf"^-n must be at least 1 and at most 1,024, got {count}$"):
        launch(count, ["true"])


def test_stage_script_launches_only_the_training() -> None:
    def said(stage: str) -> str:
        env = os.environ | {"GRADTRAIL_LAUNCH": "echo launched by", "VIRTUAL_ENV": str(Path(sys.executable).parents[1])}
        done = subprocess.run(
            ["sh", "pipeline/stage.sh", stage], cwd=ROOT, env=env, check=False, capture_output=True, text=True
        )
        return done.stdout

    assert said("train").startswith("launched by ")
    assert said("train").endswith("-P pipeline/train.py\n")
    assert not said("no_such_stage")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_PROCID": "1"}, False),  # a job of one's own, which nobody launched for this project
        ({"SLURM_PROCID": "1", "GRADTRAIL_LAUNCH": "srun"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "GRADTRAIL_LAUNCH": "mpirun"}, False),
        ({"JAX_PROCESS_ID": "3"}, True),
        ({"JAX_PROCESS_ID": "0", "SLURM_PROCID": "3"}, False),
    ],
)
def test_environment_decides_whether_a_process_is_a_follower(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_follower() is expected
