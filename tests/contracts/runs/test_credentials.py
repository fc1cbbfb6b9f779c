"""The credentials of a tracking server are in the environment alone."""

from pathlib import Path

import pytest
from projects import Project
from servers import Client, tracking_server

HIDDEN = "s3cret-token"
VERBS = ("sync", "runs", "ui", "gc", "show dvc.yaml", "predict a.png", "serve", "repro")


@pytest.mark.slow
def test_credentials_are_written_and_printed_nowhere(project: Project, tmp_path: Path) -> None:
    """Neither those in MLflow's variables nor those in the address, which is refused."""
    (tmp_path / "server").mkdir()
    with tracking_server(tmp_path / "server") as server:
        client = Client(project.folder, server.uri)
        variables = {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": HIDDEN}
        outputs = [client.dvc("repro", "--force", env=variables)]
        outputs += [client.gradtrail(verb, env=variables) for verb in ("sync", "runs", "ui")]
        assert len(server.runs()) == 4
        address = {"MLFLOW_TRACKING_URI": server.uri.replace("://", f"://ann:{HIDDEN}@")}
        for command in (["-m", "pipeline.train"], *(["-m", "gradtrail", *verb.split()] for verb in VERBS)):
            outputs.append(client.python(*command, env=address, status=2))
    assert not [output for output in outputs if HIDDEN in output]
    for path in tmp_path.rglob("*"):
        assert HIDDEN not in path.name
        assert not path.is_file() or HIDDEN.encode() not in path.read_bytes(), path
