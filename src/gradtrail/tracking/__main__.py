"""The process that ships records beside the stages, as the only one that does so for its store.

    python -m gradtrail.tracking

It takes its lock before it imports MLflow, and looks for records once more after it has released the lock: a stage that
finds the lock taken is served, or is told why not.
"""

import contextlib
import gc
import io
import os
import sys

from filelock import Timeout

from gradtrail.tracking.record import all_records, leave_notice, shipper_lock

_NICENESS = 5  # of its priority: a third of the share that a stage gets of a busy core


def main() -> None:
    """Ship records until there has been nothing to do for some seconds; the stages come first."""
    os.nice(_NICENESS)
    try:
        with shipper_lock().acquire(timeout=0):
            from gradtrail.tracking.live import fault_text  # late: MLflow takes a second to import
            from gradtrail.tracking.shipper import Shipper
            from gradtrail.tracking.store import open_store

            gc.freeze()
            shipper, fault = None, ""
            try:
                with contextlib.redirect_stderr(io.StringIO()) as printed:
                    shipper = Shipper(open_store())
            except Exception as error:
                fault = fault_text(error)
            else:
                if "warning: " in printed.getvalue():  # not that the repository was moved, which a person knows
                    leave_notice(printed.getvalue().rstrip())
                shipper.serve()
    except Timeout:
        return
    if not shipper:
        for record in all_records():
            record.tell(fault)
    elif shipper.waiting():  # begun since the last turn
        os.execv(sys.executable, [sys.executable, "-P", "-m", "gradtrail.tracking"])  # noqa: S606


if __name__ == "__main__":
    main()
