"""The files of `deploy/`: Kubernetes manifests against a schema, compose, container, and no secret in any of them.

The schema is a subset, `tests/manifest_kinds.py`: an unknown or mistyped key is an error. Kubernetes' own schemas are
looked at too where the package `kubernetes-validate` is installed; it does not know KubeRay's.
"""

import configparser
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from manifest_kinds import KINDS
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.stages.common.params import validate

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents() -> list[tuple[str, dict[str, Any]]]:
    yaml = YAML(typ="safe", pure=True)
    return [(path.name, document) for path in MANIFESTS for document in yaml.load_all(path.read_text())]


@pytest.mark.parametrize(("name", "document"), documents(), ids=lambda each: each if isinstance(each, str) else "")
def test_a_manifest_has_the_keys_and_types_of_its_kind(name: str, document: dict[str, Any]) -> None:
    validate(document, KINDS[document["kind"]], f"{name}: {document['kind']}")


def test_kubernetes_own_schemas_agree() -> None:
    if not importlib.util.find_spec("kubernetes_validate"):
        pytest.skip("not installed: kubernetes-validate")
    import kubernetes_validate  # type: ignore[import-not-found]

    for _, document in documents():
        if document["kind"] != "RayJob":
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_selectors_ports_volumes_and_references_meet() -> None:
    found = {(document["kind"], document["metadata"]["name"]): document for _, document in documents()}
    for (kind, _), document in found.items():
        if kind in ("Deployment", "StatefulSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"] == labels
            assert any(
                other["spec"]["selector"] == labels for (kind, _), other in found.items() if kind == "Service"
            ), "no service leads there"
    for pod, claims in pods(found.values()):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | claims
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def pods(all_documents: Any) -> list[tuple[dict[str, Any], set[str]]]:
    found = []
    for document in all_documents:
        spec = document.get("spec", {})
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        if "template" in spec:
            found.append((spec["template"], claims))
        if document["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            found += [(group["template"], set()) for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return found


def test_no_file_holds_a_secret() -> None:
    """Secrets are named, never given: a variable with a name of a secret has no value of its own."""
    named = re.compile(r"(PASSWORD|SECRET|TOKEN|ACCESS_KEY)")
    for _, document in documents():
        assert document["kind"] != "Secret"
        assert not any(named.search(key) for key in document.get("data", {}))
    for pod, _ in pods([document for _, document in documents()]):
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                if named.search(variable["name"]):
                    assert "value" not in variable
    compose = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for name, value in service["environment"].items():
            if named.search(name) and name != "RAY_AUTH_MODE":
                assert re.fullmatch(r"\$\{\w+:\?\}", value), f"{name} must come from the environment, and be set"


def test_compose_publishes_loopback_alone() -> None:
    compose = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text())
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert all(service.get("image") for service in compose["services"].values())


def test_workers_alone_read_the_key_for_git_and_cannot_write_it() -> None:
    compose = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text())
    mounts = {name: service.get("volumes", []) for name, service in compose["services"].items()}
    keys = {name: each for name, volumes in mounts.items() for each in volumes if ".ssh" in each}
    assert keys == {"worker": "${GRADTRAIL_SSH_DIR:?}:/home/gradtrail/.ssh:ro"}


def test_the_image_has_the_lock_and_no_root() -> None:
    lines = (DEPLOY / "Containerfile").read_text()
    assert " wget " in lines, "KubeRay's probes call it"
    assert "--require-hashes" in lines
    assert "\nCOPY locks/base.lock locks/cluster.lock " in lines
    users = re.findall(r"^USER (.+)$", lines, re.MULTILINE)
    assert users == ["1000"]
    version = re.search(r'rayVersion: "(.+)"', (DEPLOY / "kubernetes/rayjob.yaml").read_text())
    assert version
    assert f"\nray=={version[1]} " in (ROOT / "locks/cluster.lock").read_text().replace("[default]", "")


@pytest.mark.parametrize("missing", ["MLFLOW_BACKEND_STORE_URI", "MLFLOW_TRACKING_PASSWORD"])
def test_mlflow_does_not_start_without_its_secrets(missing: str, tmp_path: Path) -> None:
    names = ("BACKEND_STORE_URI", "ARTIFACTS_DESTINATION", "FLASK_SERVER_SECRET_KEY", "TRACKING_USERNAME")
    env = {f"MLFLOW_{name}": "x" for name in (*names, "TRACKING_PASSWORD")} | {"PATH": str(tmp_path)}
    del env[missing]
    done = subprocess.run(["/bin/sh", DEPLOY / "mlflow.sh"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"mlflow.sh: {missing} is not set\n")


def started(folder: Path, variables: dict[str, str]) -> list[str]:
    """Return the arguments that `mlflow.sh` gives to MLflow, and the lines of its file of settings."""
    (folder / "mlflow").write_text('#!/bin/sh\necho "$@"\ncat "$MLFLOW_AUTH_CONFIG_PATH"\n')
    (folder / "mlflow").chmod(0o755)
    names = ("ARTIFACTS_DESTINATION", "FLASK_SERVER_SECRET_KEY", "TRACKING_USERNAME", "TRACKING_PASSWORD")
    env = {f"MLFLOW_{name}": "x" for name in names} | {"PATH": f"{folder}:/usr/bin:/bin", "TMPDIR": str(folder)}
    command = ["/bin/sh", DEPLOY / "mlflow.sh"]
    return subprocess.run(command, env=env | variables, capture_output=True, text=True, check=True).stdout.splitlines()


def test_mlflow_starts_with_authentication_on_loopback_and_no_password_on_its_command_line(tmp_path: Path) -> None:
    variables = {"MLFLOW_BACKEND_STORE_URI": "postgresql://a:hidden@b/c", "MLFLOW_TRACKING_PASSWORD": "very-secret"}
    command, *config = started(tmp_path, variables)
    assert "--app-name basic-auth" in command
    assert "--host 127.0.0.1" in command
    assert "hidden" not in command
    assert "very-secret" not in "".join([command, *config])
    assert "authorization_function = mlflow.server.auth:authenticate_request_basic_auth" in config
    (written,) = (path for path in tmp_path.iterdir() if path.name != "mlflow")
    assert written.stat().st_mode & 0o077 == 0


def test_mlflow_reads_its_settings_as_they_were_given(tmp_path: Path) -> None:
    """Python's parser takes a single % for the beginning of a reference."""
    given = {"MLFLOW_BACKEND_STORE_URI": "postgresql://a:p%40%(x)s@b/c", "MLFLOW_TRACKING_USERNAME": "50% of me"}
    _, *config = started(tmp_path, given)
    read = configparser.ConfigParser()
    read.read_string("\n".join(config))
    assert read["mlflow"]["database_uri"] == given["MLFLOW_BACKEND_STORE_URI"]
    assert read["mlflow"]["admin_username"] == given["MLFLOW_TRACKING_USERNAME"]


def test_git_does_not_see_the_variables_of_compose() -> None:
    assert "/deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()
