"""The seconds since a process began are not off by those of the boot, which Linux tells whole."""

import subprocess
import sys
import time

CODE = "from gradtrail.support.running_time import seconds_running; print(seconds_running())"


def test_a_process_knows_how_long_it_runs() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], check=True, stdout=subprocess.PIPE, text=True)
    assert 0 < float(done.stdout) < time.monotonic() - started + 0.02, "ticks are hundredths"


def test_seconds_running_run_as_seconds() -> None:
    code = f"{CODE}; import time; began = time.monotonic(); time.sleep(0.2); print(time.monotonic() - began); {CODE}"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    before, slept, after = map(float, done.stdout.split())
    assert abs(after - before - slept) < 0.15
