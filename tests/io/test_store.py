import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

OPEN = "from gradtrail.io.store import experiment_id, open_store; print(experiment_id(open_store(), 'models'))"


def test_processes_that_create_the_store_at_once_agree(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING")}
    env |= {"DVC_ROOT": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", OPEN], env=env, stdout=subprocess.PIPE) for _ in range(3)]
    answers = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(answers) == 1
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert store.execute("select count(*) from experiments where name = 'models'").fetchone() == (1,)
        (location,) = store.execute("select artifact_location from experiments where name = 'models'").fetchone()
    assert location == (tmp_path / "mlruns").as_uri()
