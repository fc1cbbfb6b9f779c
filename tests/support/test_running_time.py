"""The seconds since a process began are not off by those of the boot, which Linux tells whole."""

import subprocess
import sys
import time

from gradtrail.support.running_time import seconds_running

CODE = "from gradtrail.support.running_time import seconds_running; print(seconds_running())"


def test_a_process_knows_how_long_it_runs() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], check=True, stdout=subprocess.PIPE, text=True)
    assert 0 < float(done.stdout) < time.monotonic() - started + 0.02, "ticks are hundredths"


def test_its_seconds_pass_as_those_of_a_clock() -> None:
    before, first = time.monotonic(), seconds_running()
    between = time.monotonic()
    time.sleep(0.1)
    later, second, after = time.monotonic(), seconds_running(), time.monotonic()
    assert later - between - 0.02 <= second - first <= after - before + 0.02
