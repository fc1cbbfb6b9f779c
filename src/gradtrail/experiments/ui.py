"""`gradtrail ui`: MLflow's UI on this repository's store, with a link to a comparison of all trainings."""

import os
import subprocess
import sys

from gradtrail.support.errors import UserError, one_line
from gradtrail.support.paths import SQLITE, store_uri
from gradtrail.tracking.mlflow.client import experiment_id, open_store
from gradtrail.tracking.mlflow.ui_view import link, write_view
from gradtrail.tracking.sync import sync


def serve(port: int) -> int:
    """Sync the store, print the link to the comparison, and run the UI; a tracking server has a UI of its own.

    Returns:
        The exit status of the UI.
    """
    try:
        print(sync.sync().describe())
    except UserError as error:  # the runs in the store can be shown nevertheless
        print(f"gradtrail: {one_line(error)}", file=sys.stderr)
    client = open_store()
    experiment = experiment_id(client, "models")
    write_view(client, experiment)
    if not store_uri().startswith(SQLITE):  # a tracking server
        print(f"compare trainings: {link(store_uri(), experiment)}")
        return 0
    address = f"http://127.0.0.1:{port}"
    print(f"compare trainings: {link(address, experiment)}", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--port", str(port)]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.run([*command, "--backend-store-uri", store_uri()], check=False, env=environment).returncode
