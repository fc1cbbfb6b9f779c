"""The image of the server: builds, starts without root on a read-only root, answers, and ends by SIGTERM.

Needs podman, and Debian's mmdebstrap for a base image in place of the official one, which is not downloaded.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from exports import write_small_export
from mlflow import MlflowClient
from model_store import log_export, training
from projects import ROOT
from server_process import Server
from servers import free_port, tracking_server

TOKEN = "0123456789abcdef"  # noqa: S105
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
BODY = {"inputs": [{"name": "images", "shape": [1, 28, 28], "datatype": "UINT8", "data": [0] * 784}]}
BASE, IMAGE = "localhost/debian-with-python", "localhost/gradtrail:server"
MOST_BYTES = 350_000_000  # compressed, as a registry stores it
CONTEXT = ("deploy", "locks", "src", ".dvc", "pyproject.toml", "README.md", "LICENSE", "dvc.yaml", "params.yaml")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# crun refuses a machine that has both versions of cgroups, so podman sees only the first one.
WITHOUT_CGROUPS_2 = ["unshare", "--mount", "sh", "-c", 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"', "sh"]

pytestmark = pytest.mark.nightly


@dataclass(frozen=True)
class Podman:
    """Podman with its images in a folder."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        places = ("--root", str(self.folder / "images"), "--runroot", str(self.folder / "run"))
        prefix = WITHOUT_CGROUPS_2 if os.getuid() == 0 else []
        return [*prefix, "podman", *places, "--runtime", "crun", "--cgroup-manager", "cgroupfs", *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=1800)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    def start(self, *arguments: str) -> list[str]:
        """Return the command that starts a confined container on the network of this machine."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limits = ("--ulimit", f"nofile={files}:{files}", "--ulimit", "nproc=1000:1000", "--cgroups", "disabled")
        confined = ("--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", "host")
        return self.command("run", "--rm", *limits, *confined, *arguments)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Podman with the image of the server, in a folder of a short name, as podman demands."""
    if missing := [name for name in ("podman", "crun", "mmdebstrap") if shutil.which(name) is None]:
        pytest.skip(f"missing, of Debian's packages: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        podman = Podman(Path(folder))
        make_base(podman)
        make_image(podman)
        yield podman
        podman.run("rmi", "--all", "--force")


def make_base(podman: Podman) -> None:
    """Import Debian with its Python, which trusts the certificates of this machine."""
    archive = podman.folder / "base.tar"
    include = "--include=python3,python3-venv,python-is-python3,ca-certificates"
    sources = map(str, Path("/etc/apt/sources.list.d").glob("debian.sources"))
    command = ["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", str(archive), *sources]
    if subprocess.run(command, check=False, timeout=900).returncode:
        pytest.skip("mmdebstrap makes no base image on this machine")
    variables = [f"--change=ENV {name}={CERTIFICATES}" for name in ("PIP_CERT", "SSL_CERT_FILE")]
    podman.run("import", *variables, str(archive), BASE)
    archive.unlink()


def make_image(podman: Podman) -> None:
    """Build the image from the files that git knows, and a small export."""
    if subprocess.run(podman.start(BASE, "true"), check=False, capture_output=True).returncode:
        pytest.skip("podman starts no container on this machine")
    context = podman.folder / "context"
    for path in subprocess.check_output(["git", "ls-files", *CONTEXT], cwd=ROOT, text=True).splitlines():
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, context / path)
    write_small_export(context / "models" / "export")
    options = ("--network", "host", "--isolation", "chroot", "--build-arg", f"BASE={BASE}")
    certificates = ("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro")
    file = str(context / "deploy" / "Containerfile")
    podman.run("build", *options, *certificates, "--file", file, "--tag", IMAGE, str(context))


@contextlib.contextmanager
def server(podman: Podman, *options: str, model: str = "models/export") -> Iterator[Server]:
    """Start the server in a container, and wait until it is ready."""
    port, log = free_port(), podman.folder / "stderr"
    options = ("--tmpfs", "/srv/gradtrail/.gradtrail:mode=1777", "--env", f"GRADTRAIL_TOKEN={TOKEN}", *options)
    command = podman.start(*options, IMAGE, "--model", model, "--port", str(port))
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "answers with digits" in line, line + log.read_text()
            yield Server(process, line.replace("0.0.0.0", "127.0.0.1"), log)  # noqa: S104
        finally:
            process.send_signal(signal.SIGTERM)  # podman passes it on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def compilations(server: Server) -> dict[str, int]:
    """Return the number of programs that came from the compile cache, and that did not, of one for each batch size."""
    for _ in range(100):
        text = server.send("GET", "/metrics", headers=AUTHORIZED)[1].decode()
        lines = [line for line in text.splitlines() if line.startswith("gradtrail_compile_seconds_count")]
        if len(lines) == 2:
            break
        time.sleep(0.1)
    return {kind: sum(f'cache="{kind}"' in line for line in lines) for kind in ("hit", "miss")}


def test_server_answers_from_its_compile_cache_and_ends_by_sigterm(podman: Podman) -> None:
    started = time.monotonic()
    with server(podman) as running:
        print(f"ready after {time.monotonic() - started:.1f} s, of podman too: {running.line}")
        assert running.ask("GET", "/v2/health/ready") == (200, {"ready": True})
        assert running.ask("POST", "/v2/models/digits/infer", BODY)[0] == 401
        status, answer = running.ask("POST", "/v2/models/digits/infer", BODY, AUTHORIZED)
        assert (status, answer["outputs"][0]["shape"]) == (200, [1, 10])
        assert running.send("GET", "/version", headers=AUTHORIZED)[0] == 200
        assert compilations(running) == {"hit": 2, "miss": 0}
    assert running.process.returncode == 0, running.errors.read_text()


def test_compile_cache_of_another_processor_is_refused(podman: Podman, tmp_path: Path) -> None:
    """The image's cache under the name of another kind of processor."""
    tar = ("--entrypoint", "tar", IMAGE, "--create", "--directory", "compiled", ".")
    archive = subprocess.check_output(podman.start(*tar))
    subprocess.run(["tar", "--extract", "--directory", tmp_path], input=archive, check=True)
    (compiled,) = tmp_path.iterdir()
    compiled.rename(compiled.with_name(compiled.name.rpartition("-")[0] + "-0123456789ab"))
    with server(podman, "--volume", f"{tmp_path}:/srv/gradtrail/compiled:ro") as running:
        assert compilations(running) == {"hit": 0, "miss": 2}


def test_server_gets_the_champion_from_a_registry(
    podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    with tracking_server(tmp_path / "server") as registry:
        client = MlflowClient(registry.uri)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.uri)
        client.create_experiment("models")
        run = training(client)
        model_id = log_export(client, run, write_small_export(tmp_path / "export"))
        client.create_registered_model("digits")
        client.create_model_version("digits", f"models:/{model_id}", run_id=run.info.run_id, model_id=model_id)
        client.set_registered_model_alias("digits", "champion", "1")
        options = ("--tmpfs", "/tmp", "--env", f"MLFLOW_TRACKING_URI={registry.uri}")  # noqa: S108
        with server(podman, *options, model="models:/digits@champion") as running:
            assert "answers with digits version 1 " in running.line
            assert running.ask("POST", "/v2/models/digits/infer", BODY, AUTHORIZED)[0] == 200
        assert running.process.returncode == 0


def test_image_is_small_and_has_another_user_than_root(podman: Podman, tmp_path: Path) -> None:
    assert podman.run("image", "inspect", "--format", "{{.Config.User}}", IMAGE).strip() == "1000"
    podman.run("push", "--compress", IMAGE, f"dir:{tmp_path}")
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    print(f"{num_bytes:,} bytes compressed")
    assert num_bytes <= MOST_BYTES
