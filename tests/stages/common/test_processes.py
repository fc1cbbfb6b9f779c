"""The processes of a stage: agreements, refusals in one line, and the news of a loss."""

import contextlib
import json
import queue
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gradtrail.core.common.validation import ConfigError
from gradtrail.stages.common.lifeline import Lifeline, connect, is_loopback, listen
from gradtrail.stages.common.processes import ALONE, Processes, join
from gradtrail.support.errors import UserError
from gradtrail.support.native_output import native_output
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
    assert first.of_first(lambda x: x + 1)(2) == 3
    assert second.of_first(never)(2) == 3
    assert ALONE.agreed(lambda: 5) == 5


def test_a_signal_of_another_process_reaches_process_0() -> None:
    first, second = pair()
    assert first.asked_to_stop() is None
    second.ask_to_stop(15)
    assert first.asked_to_stop() == 15
    assert ALONE.asked_to_stop() is None


def test_another_value_than_that_of_process_0_is_one_line() -> None:
    first, second = pair()
    first.require_same({"data/processed": "a"})
    with pytest.raises(UserError, match=r"^data/processed differs from that of process 0, on \S+$"):
        second.require_same({"data/processed": "b"})


def test_a_fault_of_another_process_is_told_once_by_process_0(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair()
    lost = ValueError("Gloo AllGather failed: Connection reset by peer")
    assert first.describe_loss(lost).startswith("lost another process; ")
    assert not first.describe_loss(ValueError("shapes differ"))
    assert not ALONE.describe_loss(lost)
    second.tell("train: no such file")
    assert first.describe_loss(lost) == "process 1: train: no such file"
    capsys.readouterr()
    second.describe_loss(lost)
    before = dict(second._client.values)
    second.tell("train: lost another process")
    assert second._client.values == before, "the loss is told by process 0"


def test_shards_that_the_processes_cannot_share_are_refused() -> None:
    message = r"^train\.shards must be a multiple of the number of processes, 2, got 3$"
    with pytest.raises(ConfigError, match=message):
        pair()[0].devices(3)


def test_who_is_not_told_of_others_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join("train", 1.0) is ALONE
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert join("train", 1.0) is ALONE
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(UserError, match="must be whole numbers, got 'two'"):
        join("train", 1.0)
    with pytest.raises(ValueError, match="two"):
        refuse_followers("evaluate")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(UserError, match=r"^JAX_NUM_PROCESSES is 2, but stage evaluate runs in one process$"):
        refuse_followers("evaluate")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(SystemExit):
        refuse_followers("evaluate")


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False), ("node001:1", False)],
)
def test_loopback_is_told_from_other_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


class Waiting(Client):
    """Gives values as JAX does: it waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            super().key_value_set(key, value, allow_overwrite)
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, 0.01):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


def test_nobody_goes_on_before_all_are_ready() -> None:
    client = Waiting()
    passed: queue.Queue[int] = queue.Queue()

    def go(index: int) -> None:
        processes = Processes(index, 3, client)
        for _ in range(2):
            processes.all_ready()
            passed.put(index)

    threads = [threading.Thread(target=go, args=(index,)) for index in range(3)]
    for thread in threads[:2]:
        thread.start()
    with pytest.raises(queue.Empty):
        passed.get(timeout=0.1)
    threads[2].start()
    for thread in threads:
        thread.join(10)
    assert sorted(passed.get_nowait() for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    ALONE.all_ready()


def test_who_has_not_joined_says_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ALONE.tell("train: a")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    ALONE.tell("train: b")
    assert capsys.readouterr().err == "train: a\nprocess 1: train: b\n"


def test_no_connection_to_process_0_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrail.stages.common.processes.forget_processes", lambda: None)
    with socket.socket() as unheard:  # bound, and not listening
        unheard.bind(("127.0.0.1", 0))
        client = Client()
        client.values["gradtrail/lifeline"] = json.dumps([unheard.getsockname()[1], "0" * 32])
        with pytest.raises(UserError, match=r"^no connection to process 0 on 127\.0\.0\.1: .*refused"):
            Processes(1, 2, client).hold_on("127.0.0.1:1", 1.0)
    with pytest.raises(
        UserError, match=r"^no connection to process 0 on 127\.0\.0\.1: UNAVAILABLE: process 0 is gone$"
    ):
        Processes(1, 2, Client()).hold_on("127.0.0.1:1", 1.0)


@pytest.fixture
def lifelines() -> Iterator[list[Lifeline]]:
    told: queue.Queue[str] = queue.Queue()
    found: list[Lifeline] = []
    thread = threading.Thread(target=lambda: found.append(listen("127.0.0.1", 3, 10.0, told.put)))
    thread.start()
    message = told.get(timeout=10)
    port, _ = json.loads(message)
    stranger = connect("127.0.0.1", json.dumps([port, "0" * 32]), 1)  # who does not know the word
    for said in (b"1\n", b"[" * 900 + b"\n", b'["\xc3\xa9", 1, "host"]\n'):
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(said)
            assert not other.recv(1)
    others = [connect("127.0.0.1", message, index) for index in (2, 1)]
    thread.join(10)
    stranger.close()
    stranger.thread.join(10)
    yield [*found, *others]
    for each in [*found, *others]:
        each.close()
        each.thread.join(10)


def test_the_first_process_that_ends_is_named_and_the_block_is_ended(
    lifelines: list[Lifeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradtrail.stages.common.lifeline._PATIENCE_SECONDS", 0.05)
    first, second, _ = lifelines
    ended = threading.Event()
    with first.watched(ended.set):
        assert not first.first_lost()
        second.close()
        assert ended.wait(10)
    assert first.first_lost().startswith("process 2 on ")


@pytest.mark.slow
def test_a_loss_after_the_block_ends_nothing(lifelines: list[Lifeline], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrail.stages.common.lifeline._PATIENCE_SECONDS", 1.0)
    first, second, _ = lifelines
    ended = threading.Event()
    with first.watched(ended.set):
        second.close()
        assert first._changed.wait(10)
        assert first.first_lost()
    assert not ended.wait(1.5)


def test_a_loss_before_the_block_ends_it_too_though_stderr_is_collected(
    lifelines: list[Lifeline], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradtrail.stages.common.lifeline._PATIENCE_SECONDS", 0.05)
    first, second, _ = lifelines
    processes, ended = Processes(0, 3, Client()), threading.Event()
    processes._lifeline = first
    monkeypatch.setattr(processes, "exit", lambda _: ended.set())
    second.close()
    assert first._changed.wait(10)
    with processes.watched("train"), native_output():
        assert ended.wait(10)
    assert re.fullmatch(
        r"train: lost process 2 on \S+; `dvc repro` starts again, from the last checkpoint if there is one\n",
        capfd.readouterr().err,
    )


def test_a_fault_within_an_inner_block_ends_the_watch(
    lifelines: list[Lifeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradtrail.stages.common.lifeline._PATIENCE_SECONDS", 0.1)
    first, second, _ = lifelines
    ended = threading.Event()
    with first.watched(ended.set):
        with contextlib.suppress(ValueError), first.watched(ended.set):
            raise ValueError
        second.close()
        assert not ended.wait(0.4)
