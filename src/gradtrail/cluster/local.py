"""A Ray cluster on this machine, for the time of a block."""

import contextlib
import os
from collections.abc import Iterator

from gradtrail.cluster.checkout import FOLDER
from gradtrail.cluster.client import require_ray
from gradtrail.support.git import with_interpreter
from gradtrail.support.paths import private_folder


@contextlib.contextmanager
def local_cluster() -> Iterator[str]:
    """Start Ray with a job server on loopback; yield the server's address, and stop Ray in the end."""
    require_ray()
    import ray  # late: an optional package

    os.environ["PATH"] = with_interpreter()["PATH"]  # jobs start `python`
    os.environ.setdefault(FOLDER, str(private_folder() / "cluster"))
    context = ray.init(
        address="local",
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
