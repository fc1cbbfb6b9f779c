"""A server process under load: promotions, a trial, kill -9, and an unavailable registry."""

import contextlib
import http.client
import json
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from exports import write_small_export
from mlflow import MlflowClient
from model_store import log_export, training, write_export_params
from server_process import Server, server
from servers import Proxy, tracking_server

ROOT = Path(__file__).parents[2]
BODY = json.dumps({"inputs": [{"name": "images", "shape": [1, 28, 28], "datatype": "UINT8", "data": [0] * 784}]})
LABELS = {"1": 3, "2": 7}  # the only label of each version
NUM_PROMOTIONS = 20

pytestmark = pytest.mark.slow


def serving(folder: Path, *options: str) -> contextlib.AbstractContextManager[Server]:
    """Serve the champion of the project in a folder."""
    for part in (".dvc", "src/gradtrail"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "dvc.yaml").write_text("stages: {}\n")
    return server("models:/digits@champion", *options, project=folder, DVC_ROOT=str(folder))


class Load:
    """Clients that send one request after the other; counts answers by version, and records failures."""

    def __init__(self, server: Server, clients: int = 2) -> None:
        self.server, self.answers, self.failures = server, Counter[str](), list[str]()
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: int) -> None:
        number = 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)) as connection:
            while not self._has_ended.is_set():
                number += 1
                try:
                    connection.request("POST", "/v2/models/digits/infer", BODY, {"X-Request-Id": f"{client} {number}"})
                    answer = connection.getresponse()
                    self._record(answer.status, answer.read())
                except (OSError, http.client.HTTPException) as error:
                    self.failures.append(repr(error))
                    connection.close()
                    time.sleep(0.01)

    def _record(self, status: int, content: bytes) -> None:
        if status != 200:
            self.failures.append(f"{status} {content!r}")
            return
        answer = json.loads(content)
        label = next(output["data"][0] for output in answer["outputs"] if output["name"] == "label")
        if label != LABELS[answer["model_version"]]:
            self.failures.append(f"version {answer['model_version']}: label {label}")
        self.answers[answer["model_version"]] += 1


def register(client: MlflowClient, folder: Path) -> None:
    """Register two versions; the first one is the champion."""
    client.create_registered_model("digits")
    for version, label in LABELS.items():
        run = training(client, seed=label)
        model_id = log_export(client, run, write_small_export(folder / f"export-{version}", always=label))
        client.create_model_version("digits", f"models:/{model_id}", run_id=run.info.run_id, model_id=model_id)
    promote(client, "1")


def promote(client: MlflowClient, version: str, alias: str = "champion") -> None:
    client.set_registered_model_alias("digits", alias, version)


def test_twenty_promotions_under_load_lose_no_request(client: MlflowClient, tmp_path: Path) -> None:
    register(client, tmp_path)
    with serving(tmp_path, "--follow-seconds", "0.1") as running, Load(running) as load:
        for number in range(NUM_PROMOTIONS):
            version = "21"[number % 2]
            promote(client, version)
            before = load.answers[version]
            running.wait(lambda before=before, version=version: load.answers[version] > before + 10)
        assert running.metric('gradtrail_model_swaps_total{role="primary"}') == NUM_PROMOTIONS
        assert running.metric("gradtrail_compiles_in_request_total") == 0
    assert load.failures == []
    assert min(load.answers.values()) > 100


def test_killed_server_restarts_from_the_compile_cache(client: MlflowClient, tmp_path: Path) -> None:
    def compiled(server: Server) -> list[str]:
        lines = server.send("GET", "/metrics")[1].decode().splitlines()
        return [line for line in lines if "compile_seconds_count{" in line]

    register(client, tmp_path)
    with serving(tmp_path) as running, Load(running) as load:
        running.wait(lambda: load.answers["1"] > 50 and len(compiled(running)) == 2)  # the batch sizes 1 and 8
        port = running.port
        running.end(signal.SIGKILL)
    with serving(tmp_path, "--port", str(port)) as again, Load(again) as load:
        again.wait(lambda: load.answers["1"] > 50 and len(compiled(again)) == 2)
        assert all('cache="hit"' in line for line in compiled(again)), compiled(again)
        startup = again.metric("gradtrail_startup_seconds")
    assert load.failures == []
    print(f"ready after {startup:.1f} s")


def test_challenger_that_always_answers_7_is_stopped_and_the_next_one_tried(
    client: MlflowClient, tmp_path: Path
) -> None:
    register(client, tmp_path)
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/slo.yaml", tmp_path / "deploy")
    options = ("--challenger", "@challenger", "--canary", "10%", "--follow-seconds", "0.1")
    with serving(tmp_path, *options) as running:
        assert running.ask("GET", "/rollout")[1]["state"] == "off", "there is no such alias yet"
        promote(client, "2", "challenger")
        running.wait(lambda: running.ask("GET", "/rollout")[1]["state"] == "canary")
        with Load(running) as load:
            running.wait(lambda: running.ask("GET", "/rollout")[1]["state"] == "stopped")
            count = load.answers["1"]
            running.wait(lambda: load.answers["1"] > count + 100)
        about = running.ask("GET", "/rollout")[1]
        assert about["stopped"]["because"] == "agreement"
        assert load.answers["2"] < 200
        assert load.failures == []
        assert running.metric('gradtrail_rollout_state{state="stopped"}') == 1
        assert running.errors.read_text().count("the challenger, version 2, is stopped: ") == 1
        promote(client, "1", "challenger")
        running.wait(lambda: running.ask("GET", "/rollout")[1]["state"] == "canary")


@pytest.mark.nightly
def test_unavailable_registry_changes_nothing_and_a_promotion_is_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_export_params("digits")
    with tracking_server(tmp_path) as tracking, Proxy(tracking.port) as proxy:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
        client = MlflowClient(tracking.uri)
        register(client, tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
        with serving(tmp_path, "--follow-seconds", "0.1") as running, Load(running) as load:
            running.wait(lambda: load.answers["1"] > 50)
            proxy.lives = 0  # it takes connections and never answers
            running.wait(lambda: running.metric("gradtrail_registry_up") == 0)
            promote(client, "2")
            before = load.answers["1"]
            running.wait(lambda: load.answers["1"] > before + 100)
            proxy.revive()
            running.wait(lambda: load.answers["2"] > 10)
            assert running.metric("gradtrail_registry_up") == 1
            log = running.errors.read_text()
    assert load.failures == []
    assert log.count("the primary is still models:/digits/1") == 1, log
    assert log.count("models:/digits@champion can be loaded again") == 1
