"""One of those who want a state gets the lease; a dead holder's is taken over, and a holder that was cut off stops."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cluster_repository import SharedRepository, run_git
from projects import ROOT

from gradtrail.cluster.task import lease as leases
from gradtrail.cluster.task.lease import Lease, LostLeaseError, Pace, acquire
from gradtrail.cluster.task.refs import SharedRefs
from gradtrail.cluster.task.shell import CommandError

QUICK = Pace(expires=1.5, renew=0.1, poll=0.05)  # where it is to expire
LASTING = Pace(expires=30, renew=0.1, poll=0.05)
KEY = "0123456789abcdef"
LEASE = f"refs/gradtrail/leases/{KEY}"
_HOLD = """
import sys
from pathlib import Path
from gradtrail.cluster.task.lease import acquire
from gradtrail.cluster.task.refs import SharedRefs
lease = acquire(SharedRefs(sys.argv[1], Path(sys.argv[2])), [sys.argv[3]])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def refs(shared: SharedRepository) -> SharedRefs:
    return SharedRefs(shared.url, shared.clone)


def held(found: Lease | None) -> Lease:
    assert found is not None
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "is_of_this_host", lambda _: False)


def test_of_two_one_gets_it_and_the_other_hears_that_it_is_held(refs: SharedRefs, shared: SharedRepository) -> None:
    first = held(acquire(refs, [KEY], LASTING))
    assert acquire(refs, [KEY], LASTING) is None
    first.release()
    assert shared.refs("refs/gradtrail") == {}
    held(acquire(refs, [KEY], LASTING)).release()


def test_of_many_at_once_one_gets_it(refs: SharedRefs) -> None:
    got: list[Lease | None] = []
    threads = [threading.Thread(target=lambda: got.append(acquire(refs, [KEY], LASTING))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lease,) = [lease for lease in got if lease]
    lease.release()


def test_leases_on_several_states_are_got_together_or_not_at_all(refs: SharedRefs, shared: SharedRepository) -> None:
    first = held(acquire(refs, [KEY], LASTING))
    assert acquire(refs, ["another", KEY], LASTING) is None
    assert set(shared.refs("refs/gradtrail")) == {LEASE}
    first.release()


def test_the_lease_of_a_process_that_was_killed_here_is_taken_over_at_once(
    refs: SharedRefs, shared: SharedRepository
) -> None:
    command = [sys.executable, "-c", _HOLD, shared.url, str(shared.clone), KEY]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()
    slow = Pace(expires=600, renew=100, poll=0.03)
    held(acquire(refs, [KEY], slow)).release()


def test_the_lease_of_another_host_is_taken_over_once_it_was_not_renewed(
    refs: SharedRefs, shared: SharedRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another_host(monkeypatch)
    silent = held(acquire(refs, [KEY], Pace(expires=1000, renew=900)))
    before = shared.refs("refs/gradtrail")
    began = time.monotonic()
    second = held(acquire(refs, [KEY], QUICK))
    assert time.monotonic() - began >= QUICK.expires
    assert shared.refs("refs/gradtrail") != before
    second.release()
    silent.release()


def test_a_holder_that_was_cut_off_stops_and_publishes_nothing(refs: SharedRefs, shared: SharedRepository) -> None:
    lease = held(acquire(refs, [KEY], Pace(expires=30, renew=0.3, poll=0.05)))
    stopped = threading.Event()
    other = refs.write_blob(json.dumps({"process": "elsewhere:1"}))
    run_git(shared.clone, "push", "-q", "--force", shared.url, f"{other}:{LEASE}")
    with pytest.raises(LostLeaseError, match=f"^the lease on {KEY[:12]} was taken over"), lease.guarding(stopped.set):
        assert stopped.wait(30)
    with pytest.raises(LostLeaseError):
        lease.publish({"refs/exps/x": shared.commit}, refs)
    lease.release()
    assert shared.refs("refs/gradtrail") == {LEASE: other}, "the other's lease stands"
    assert shared.refs("refs/exps") == {}


def test_a_lease_that_was_lost_just_before_publishing_is_found_out_by_the_push(
    refs: SharedRefs, shared: SharedRepository
) -> None:
    lease = held(acquire(refs, [KEY], Pace(expires=1000, renew=900)))
    run_git(shared.clone, "push", "-q", shared.url, f":{LEASE}")
    with pytest.raises(LostLeaseError):
        lease.publish({"refs/exps/x": shared.commit}, refs)
    assert shared.refs("refs/exps") == {}
    lease.release()


@pytest.mark.slow
def test_a_remote_that_is_away_loses_the_lease_before_others_may_take_it(
    refs: SharedRefs, shared: SharedRepository, tmp_path: Path
) -> None:
    lease = held(acquire(refs, [KEY], QUICK))
    shared.bare.rename(tmp_path / "away")
    stopped = threading.Event()
    with pytest.raises(LostLeaseError), lease.guarding(stopped.set):
        assert stopped.wait(30)
    lease.release()


def test_a_remote_that_hangs_loses_the_lease_before_others_may_take_it(
    refs: SharedRefs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = held(acquire(refs, [KEY], QUICK))
    hanging = tmp_path / "bin" / "git"
    hanging.parent.mkdir()
    real = shutil.which("git")
    hanging.write_text(f'#!/bin/sh\ncase $1 in push|ls-remote) sleep 30;; esac\nexec {real} "$@"\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hanging.parent}:{os.environ['PATH']}")
    stopped = threading.Event()
    with pytest.raises(LostLeaseError), lease.guarding(stopped.set):
        assert stopped.wait(15), "it waited as long as git hangs"
    lease.release()


def test_a_renewal_that_arrived_without_an_answer_is_the_holder_s_own(
    refs: SharedRefs, shared: SharedRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap, pushed = SharedRefs.swap, list[str]()

    def mute(self: SharedRefs, changes: Mapping[str, tuple[str, str]]) -> bool:
        is_done = swap(self, changes)
        pushed.append(changes[LEASE][1])
        if len(pushed) == 2:
            raise CommandError("no answer")
        return is_done

    monkeypatch.setattr(SharedRefs, "swap", mute)
    lease = held(acquire(refs, [KEY], Pace(expires=20, renew=0.1)))
    until(lambda: len(pushed) >= 4)
    assert pushed[1] == pushed[2] != pushed[3]
    lease.publish({"refs/exps/x": shared.commit}, refs)
    lease.release()
    assert shared.refs("refs/gradtrail") == {}


def test_a_lost_lease_says_the_same_after_its_way_from_a_worker() -> None:
    error = LostLeaseError("the lease on 0123 was taken over")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - Ray carries errors so


def test_publishing_gives_the_lease_back_in_the_same_push(refs: SharedRefs, shared: SharedRepository) -> None:
    lease = held(acquire(refs, [KEY], LASTING))
    before = shared.refs("refs/gradtrail")
    until(lambda: shared.refs("refs/gradtrail") != before)  # it was renewed
    with lease.guarding(lambda: None):
        pass
    lease.publish({"refs/exps/x": shared.commit}, refs)
    assert shared.refs("refs/gradtrail") == {}
    assert shared.refs("refs/exps") == {"refs/exps/x": shared.commit}
    lease.release()
