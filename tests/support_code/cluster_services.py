"""The pieces around a cluster, on loopback: S3 (moto's server), MLflow's server, and Ray's nodes."""

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
from projects import ROOT
from servers import answers, free_port, service

BUCKET = "gradtrail"
Environment = Mapping[str, str]


@contextlib.contextmanager
def s3(folder: Path, env: Environment) -> Iterator[str]:
    """Run moto's S3 server with an empty bucket; yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with service(command, folder / "s3.log", env, lambda: answers(f"{url}/moto-api/")):
        assert requests.put(f"{url}/{BUCKET}", timeout=10).ok
        yield url


def require_keys(url: str) -> dict[str, str]:
    """Make moto's server refuse unknown keys from now on; return the environment with the one key that it knows."""
    import boto3  # which the extra `cluster` does not have

    any_key = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    client = boto3.client("iam", endpoint_url=url, region_name="us-east-1", **any_key)
    client.create_user(UserName="node")
    allow = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    client.put_user_policy(UserName="node", PolicyName="all", PolicyDocument=json.dumps(allow))
    key = client.create_access_key(UserName="node")["AccessKey"]
    assert requests.post(f"{url}/moto-api/reset-auth", data="0", timeout=10).ok
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


@dataclass
class MlflowServer:
    """MLflow's server behind its basic authentication, which can be killed and started again."""

    folder: Path
    env: Environment
    database: str
    port: int = field(default_factory=free_port)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        variables = {"MLFLOW_BACKEND_STORE_URI": self.database, "MLFLOW_ARTIFACTS_DESTINATION": f"s3://{BUCKET}/mlflow"}
        variables |= {"MLFLOW_FLASK_SERVER_SECRET_KEY": "a-key-for-tests", "MLFLOW_PORT": str(self.port)}
        command = ["sh", str(ROOT / "deploy" / "mlflow.sh")]
        ready = lambda: answers(f"{self.uri}/health")  # noqa: E731
        with service(command, self.folder / "mlflow.log", {**self.env, **variables}, ready, cwd=self.folder):
            yield


def why_no_cluster() -> str:
    """Return what is missing for these services, in one line; nothing where all is there."""
    missing = [name for name in ("ray", "dvc_s3", "moto", "boto3") if not importlib.util.find_spec(name)]
    return f"not installed: {', '.join(missing)}" if missing else ""


@dataclass
class RayNodes:
    """A head without cores of its own, and worker nodes."""

    folder: Path
    env: Environment
    port: int = field(default_factory=free_port)
    dashboard: int = field(default_factory=free_port)
    nodes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.dashboard}"

    @contextlib.contextmanager
    def running(self, num_workers: int) -> Iterator["RayNodes"]:
        with contextlib.ExitStack() as stack:
            head = ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}", "--num-cpus=0"]
            head += ["--dashboard-host=127.0.0.1", "--include-dashboard=true", f"--temp-dir={self.folder / 'ray'}"]
            self._start(stack, "head", head, lambda: answers(f"{self.address}/api/version"))
            for number in range(num_workers):
                worker = [f"--address=127.0.0.1:{self.port}", "--num-cpus=1"]
                log = self.folder / f"worker{number}.log"
                self._start(stack, f"worker{number}", worker, lambda log=log: "Ray runtime started" in log.read_text())
            yield self

    def raylet(self, node: str) -> psutil.Process:
        """Return the process that is a node: with it, its workers end."""
        for child in psutil.Process(self.nodes[node].pid).children(recursive=True):
            if "raylet" in Path(child.cmdline()[0] if child.cmdline() else "").name:
                return child
        raise LookupError(node)

    def busy_workers(self) -> list[psutil.Process]:
        """Return the workers that run an experiment."""
        workers = []
        for node in self.nodes.values():
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(node.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if " ".join(process.cmdline()).startswith("ray::gradtrail"):
                            workers.append(process)
        return workers

    def _start(self, stack: contextlib.ExitStack, name: str, options: list[str], ready: Any) -> None:
        variables = {"GRADTRAIL_CLUSTER_DIR": str(self.folder / name), "RAY_raylet_start_wait_time_s": "120"}
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--node-ip-address=127.0.0.1"]
        command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
        env = {**self.env, **variables}
        self.nodes[name] = stack.enter_context(service(command, self.folder / f"{name}.log", env, ready))
