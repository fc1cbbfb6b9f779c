"""The seconds since a process began are not off by those of the boot, which Linux tells whole."""

import subprocess
import sys
import time

CODE = "from gradtrail.support.running_time import seconds_running; print(seconds_running())"


def test_a_process_knows_how_long_it_runs() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE], check=True, stdout=subprocess.PIPE, text=True)
    assert 0 < float(done.stdout) < time.monotonic() - started + 0.02, "ticks are hundredths"
