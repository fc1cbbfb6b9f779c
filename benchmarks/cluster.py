"""Experiments on Ray while workers, a node and MLflow's server are killed; beside DVC's queue on the same cores.

    python -m benchmarks.cluster [--variants 4] [--seeds 6] [--timed-seeds 2] [--keep FOLDER]

All on this machine, on loopback: a bare git repository, S3 (moto's server) for DVC's remote and MLflow's artifacts,
MLflow's server with PostgreSQL behind its basic authentication, Ray with a head and three worker nodes of one core and
one folder each. Needs the extra `cluster`, `moto[s3,server]`, `boto3` and PostgreSQL.

Ray makes the experiments, and meanwhile SIGKILL ends three workers at work, a worker node, and for 20 s MLflow's
server; the command that follows the job is stopped once by Ctrl-C, and called again. Everything is counted. Then DVC's
queue makes the same in another clone, with a store of its own, and the two tables are compared. Times are compared in
runs of their own, without kills, the queue with as many jobs as Ray has workers; with `--timed-seeds 0` there are none.
"""

import argparse
import contextlib
import csv
import hashlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import requests
from ruamel.yaml import YAML

from benchmarks.record import record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support_code"))  # what the tests start, this starts too

from cluster_repository import run_git
from cluster_services import BUCKET, MlflowServer, RayNodes, s3, why_no_cluster
from postgres import postgres, why_no_postgres
from projects import QUICK, Project, copy_project, environment

_WORKERS = 3
_AWAY_SECONDS = 20.0
_RATE, _SHOW, _TIMED = "train.adamw.learning_rate", "show", "timed"
_SETTINGS = QUICK | {
    "train.epochs": 1,
    "train.precision": "float32",
    "train.keep_epochs": [],
    "train.mlp.hidden": [16],
    "runtime.system_metrics": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--timed-seeds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder to work in, which is kept")
    options = parser.parse_args()
    if why := why_no_cluster() or why_no_postgres():
        sys.exit(f"cluster: {why}")
    with contextlib.ExitStack() as stack:
        if options.keep:
            options.keep.mkdir(parents=True)
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = Show(folder.resolve(), options).run(stack)
    options.keep = None  # a path of this machine is no result
    record("cluster", results, options)


class Show:
    """The experiments and the services around them.

    Args:
        folder: to work in.
        options: how many experiments.
    """

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder = folder
        self.num = options.variants * options.seeds
        self.options = options
        self.secret = secrets.token_hex(16)
        self.kills: list[str] = []
        clean = {name: value for name, value in environment().items() if not name.startswith(("RAY_", "AWS_"))}
        self.env = clean | {
            "AWS_ACCESS_KEY_ID": "gradtrail",
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "MLFLOW_TRACKING_USERNAME": "gradtrail",
            "MLFLOW_TRACKING_PASSWORD": f"Password-{self.secret}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": f"{self.secret}{self.secret}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def run(self, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Run everything; return the results, or raise AssertionError where something is not as promised."""
        s3_url = stack.enter_context(s3(self.folder, self.env))
        self.env["AWS_ENDPOINT_URL"] = self.env["MLFLOW_S3_ENDPOINT_URL"] = s3_url
        self.server = MlflowServer(self.folder, self.env, stack.enter_context(postgres()))
        self.server_block = contextlib.ExitStack()
        stack.callback(self.server_block.close)
        self.server_block.enter_context(self.server.running())
        project = self._project(s3_url)
        other = project.copy(self.folder / "other")
        say("services are up, the commit is pushed")

        nodes = stack.enter_context(RayNodes(self.folder, self.env).running(_WORKERS))
        self.ray = self.env | {
            "RAY_API_SERVER_ADDRESS": nodes.address,
            "MLFLOW_TRACKING_URI": self.server.uri,
            "PYTHONPATH": str(project.folder / "src"),
        }
        began = time.monotonic()
        table = self._with_kills(project, nodes)
        disturbed = time.monotonic() - began
        say(f"Ray made {self.num} experiments in {disturbed:.0f} s; killed: {', '.join(self.kills)}")
        checks = self._check(project)
        say(f"as promised: {checks}")
        results = {"experiments": self.num, "killed": self.kills, "seconds_with_kills": disturbed, **checks}
        if self.options.timed_seeds:
            results |= self._times(project, other)

        began = time.monotonic()
        assert numbers(self._queue(other, _SHOW)) == numbers(table), "the tables differ"
        queue_seconds = time.monotonic() - began
        say(f"DVC's queue made the same table in {queue_seconds:.0f} s")
        return results | {"tables_equal": True, "queue_seconds_same_experiments": queue_seconds}

    def _project(self, s3_url: str) -> Project:
        """Make the project with a first result, pushed to git and to S3, its runs in MLflow."""
        project = copy_project(self.folder / "project")
        for key, value in _SETTINGS.items():
            project.set(key, value)
        rates = {f"rate {n}": {_RATE: 0.001 * (n + 1)} for n in range(self.options.variants)}
        about = {"about": "which learning rate?", "timed": True}
        seeds = {_SHOW: range(1, self.options.seeds + 1), _TIMED: range(100, 100 + max(1, self.options.timed_seeds))}
        comparisons = {name: about | {"seeds": [*own], "variants": rates} for name, own in seeds.items()}
        YAML().dump(comparisons, project.folder / "experiments.yaml")
        bare = self.folder / "shared.git"
        run_git(self.folder, "init", "-q", "--bare", str(bare))
        project.git("remote", "add", "origin", str(bare))
        project.dvc("remote", "add", "--default", "storage", f"s3://{BUCKET}/dvc")
        project.dvc("remote", "modify", "storage", "endpointurl", s3_url)
        project.commit("a project with remotes")
        env = self.env | {"MLFLOW_TRACKING_URI": self.server.uri}
        project.dvc("repro", "evaluate", env=env)
        project.commit("results")
        project.git("push", "-q", "-u", "origin", "HEAD:main")
        project.dvc("push", "--run-cache", env=self.env)
        return project

    def _queue(self, project: Project, name: str) -> list[dict[str, str]]:
        """Run a comparison by DVC's queue, with as many jobs as Ray has workers; return its table."""
        env = self.env | {"PYTHONPATH": str(project.folder / "src")}
        command = [sys.executable, "-m", "gradtrail", "compare", name, "--jobs", str(_WORKERS)]
        said = subprocess.run(command, cwd=project.folder, env=env, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout + said.stderr
        return read_table(project, name)

    def _compare(self, project: Project, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gradtrail", "compare", name]
        log = (self.folder / "compare.log").open("a")
        return subprocess.Popen(command, cwd=project.folder, env=self.ray, stdout=log, stderr=log, text=True)

    def _with_kills(self, project: Project, nodes: RayNodes) -> list[dict[str, str]]:
        """Run the comparison on Ray while things are killed; return its table."""
        process = self._compare(project, _SHOW)
        disturbing = threading.Thread(target=self._disturb, args=(nodes,), daemon=True)
        disturbing.start()
        wait_until(lambda: self._num_made() >= self.num // 3 or process.poll() is not None)
        process.send_signal(signal.SIGINT)  # the job goes on without who follows it
        process.wait()
        self.kills.append("Ctrl-C of the command")
        for _ in range(3):  # an experiment that failed for a kill at a bad moment is made by the next call
            process = self._compare(project, _SHOW)
            if process.wait() == 0:
                break
            self.kills.append("command called again")
        disturbing.join(1)
        assert process.returncode == 0, (self.folder / "compare.log").read_text()
        return read_table(project, _SHOW)

    def _disturb(self, nodes: RayNodes) -> None:
        """Kill three workers, a node, and MLflow's server for 20 s, each once so many experiments are made."""
        for number in range(3):
            wait_until(lambda number=number: self._num_made() >= 1 + 2 * number)
            wait_until(lambda: len(nodes.busy_workers()) > 0)
            time.sleep(3)  # amid a stage
            with contextlib.suppress(psutil.Error):
                nodes.busy_workers()[0].kill()
                self.kills.append("worker")
        wait_until(lambda: self._num_made() >= self.num // 2)
        nodes.raylet("worker1").kill()
        self.kills.append("node")
        wait_until(lambda: self._num_made() >= self.num // 2 + 2)
        self.server_block.close()
        self.kills.append("MLflow's server")
        time.sleep(_AWAY_SECONDS)
        self.server_block.enter_context(self.server.running())

    def _num_made(self) -> int:
        return len(run_git(self.folder / "shared.git", "for-each-ref", "refs/exps").splitlines())

    def _check(self, project: Project) -> dict[str, Any]:
        """Count refs, states, runs and files; raise AssertionError where one is missing, twice or damaged."""
        refs = run_git(self.folder / "shared.git", "for-each-ref", "--format=%(refname)", "refs/exps").splitlines()
        assert len(refs) == self.num, refs
        runs = {stage: self._runs(stage) for stage in ("train", "evaluate")}
        for stage, found in runs.items():
            states = Counter(tags(run)["state"] for run in found)
            assert len(states) == len(found) == self.num + 1, (stage, states)  # and that of the commit itself
            assert {run["info"]["status"] for run in found} == {"FINISHED"}
        clone = self.folder / "clone"
        run_git(self.folder, "clone", "-q", str(self.folder / "shared.git"), str(clone), "--branch", "main")
        names = [ref.rpartition("/")[2] for ref in refs]
        command = [sys.executable, "-m", "dvc", "exp", "pull", "-q", "origin", *names]
        subprocess.run(command, cwd=clone, env=self.env, check=True)
        files = [path for path in (clone / ".dvc/cache/files/md5").glob("??/*") if path.is_file()]
        for path in files:
            digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
            assert digest == (path.parent.name + path.name).removesuffix(".dir"), path
        missing = self._missing_files(clone, refs)
        assert not missing, missing
        entries = Counter(tags(run)["mlflow.runName"] for run in runs["train"])
        attempts = sum(int(tags(run).get("attempts", 1)) for run in runs["train"])
        leaks = self._leaks(project)
        assert not leaks, leaks
        return {
            "refs": len(refs),
            "train_runs": len(runs["train"]) - 1,
            "evaluate_runs": len(runs["evaluate"]) - 1,
            "train_attempts": attempts - 1,
            "rebuilt": sum("rebuilt" in tags(run) for found in runs.values() for run in found),
            "files": len(files),
            "names": len(entries),
            "leaks": 0,
        }

    def _missing_files(self, clone: Path, refs: list[str]) -> list[str]:
        """Return the outs of training and evaluation that the remote lacks, of any experiment."""
        missing = []
        for ref in refs:
            lock = YAML(typ="safe").load(run_git(clone, "show", f"{ref}:dvc.lock"))
            for stage in ("train", "evaluate"):
                for out in lock["stages"][stage]["outs"]:
                    md5 = out["md5"]
                    is_tracked = out["path"].startswith("results/metrics/")
                    if not is_tracked and not (clone / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).is_file():
                        missing.append(f"{ref}: {out['path']}")
        return missing

    def _runs(self, stage: str) -> list[dict[str, Any]]:
        auth = (self.env["MLFLOW_TRACKING_USERNAME"], self.env["MLFLOW_TRACKING_PASSWORD"])
        url = f"{self.server.uri}/api/2.0/mlflow"
        of_models: dict[str, Any] = {"max_results": 100, "filter": "tags.`gradtrail.experiment` LIKE '%-models'"}
        found = requests.post(f"{url}/experiments/search", json=of_models, auth=auth, timeout=60).json()
        experiments = [one["experiment_id"] for one in found.get("experiments", [])]
        of_stage: Any = {"experiment_ids": experiments, "filter": f"tags.stage = '{stage}'", "max_results": 1000}
        return requests.post(f"{url}/runs/search", json=of_stage, auth=auth, timeout=60).json().get("runs", [])

    def _leaks(self, project: Project) -> list[str]:
        """Return the files that hold a credential, of logs (Ray's too), git, MLflow's artifacts and tags."""
        places = [self.folder / "ray", self.folder / "compare.log", project.folder, self.folder / "clone"]
        places += [self.folder / name for name in ("head", "head.log", "mlflow.log", "shared.git")]
        places += [self.folder / f"worker{n}{end}" for n in range(_WORKERS) for end in ("", ".log")]
        download = [sys.executable, "-c", _DOWNLOAD, str(self.folder / "artifacts"), BUCKET]
        subprocess.run(download, env=self.env, check=True)
        (self.folder / "tags.json").write_text(str([self._runs(stage) for stage in ("train", "evaluate")]))
        places += [self.folder / "artifacts", self.folder / "tags.json"]
        return [str(path) for path in all_files(places) if self.secret.encode() in read(path)]

    def _times(self, project: Project, other: Project) -> dict[str, Any]:
        """Return how long DVC's queue and Ray take for the same experiments, one after the other."""
        began = time.monotonic()
        queued = self._queue(other, _TIMED)
        middle = time.monotonic()
        assert self._compare(project, _TIMED).wait() == 0, (self.folder / "compare.log").read_text()
        seconds = {"queue_seconds": middle - began, "ray_seconds": time.monotonic() - middle}
        assert numbers(read_table(project, _TIMED)) == numbers(queued)
        ratio = seconds["ray_seconds"] / seconds["queue_seconds"]
        say(f"DVC's queue {seconds['queue_seconds']:.0f} s, Ray {seconds['ray_seconds']:.0f} s: × {ratio:.2f}")
        return seconds | {"ratio": ratio, "timed_experiments": len(queued)}


_DOWNLOAD = """
import sys
from pathlib import Path
import boto3
folder, bucket = Path(sys.argv[1]), sys.argv[2]
client = boto3.client("s3")
for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
    for one in page.get("Contents", []):
        path = folder / one["Key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, one["Key"], str(path))
"""


def tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


def read_table(project: Project, name: str) -> list[dict[str, str]]:
    with (project.folder / f"results/comparisons/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def numbers(table: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """Return what must be the same wherever a table's runs were made: all but times and ids."""
    return sorted(
        (row["variant"], row["seed"], row["test_accuracy"], row["test_loss"], row["dataset"]) for row in table
    )


def wait_until(condition: Any, seconds: float = 3600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def all_files(places: list[Path]) -> Iterator[Path]:
    for place in places:
        yield from [place] if place.is_file() else (path for path in place.rglob("*") if path.is_file())


def read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def say(line: str) -> None:
    print(f"cluster: {line} (load {os.getloadavg()[0]:.1f})", flush=True)


if __name__ == "__main__":
    main()
