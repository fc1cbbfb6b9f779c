"""The files of `deploy/`: valid by the schemas of Kubernetes and Compose, with names that agree, without a secret.

Also the workflows of GitHub: what they run exists here, and what they use is pinned.
"""

import configparser
import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import grimp
import kubernetes_validate
import pytest
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.serving.commands import serve
from gradtrail.serving.metrics import ServerMetrics
from gradtrail.serving.server.app import create_app
from gradtrail.serving.server.batching import BatchingConfig
from gradtrail.serving.server.router import Router

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = sorted(DEPLOY.glob("*compose.yaml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Of modules, and in functions, that the server's own modules import, but that a server does not: networks, data sets.
NEVER_IMPORTED = {"rich", "sklearn"}
CREDENTIAL = re.compile(r"(PASSWORD|SECRET|TOKEN|ACCESS_KEY)")


def read(path: Path) -> list[dict[str, Any]]:
    return [*YAML(typ="safe", pure=True).load_all(path.read_text())]


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in read(path)]


def services() -> dict[str, dict[str, Any]]:
    """The services of the files of Compose."""
    return {name: service for path in COMPOSE for name, service in read(path)[0]["services"].items()}


def pods() -> list[dict[str, Any]]:
    """All pods, those of a RayJob too; each with the names of the volumes that its set claims for it."""
    pods = []
    for document in documents():
        spec = document.get("spec", {})
        claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        if "template" in spec:
            pods.append({**spec["template"], "claims": claims})
        if document["kind"] == "RayJob":
            cluster = spec["rayClusterSpec"]
            groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
            pods += [{**group["template"], "claims": []} for group in groups]
    return pods


def test_manifests_are_valid_by_the_schemas_of_kubernetes() -> None:
    """KubeRay's own kind has no schema there, but its pods have one."""
    validated = [document for document in documents() if document["kind"] != "RayJob"]
    keys = ("metadata", "spec")
    validated += [{"apiVersion": "v1", "kind": "Pod", **{key: pod[key] for key in keys}} for pod in pods()]
    for document in validated:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("compose-spec", COMPOSE),
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))),
        ("dependabot", [ROOT / ".github" / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_of_compose_and_github_are_valid_by_their_schemas(schema: str, paths: list[Path]) -> None:
    assert paths
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def steps() -> list[dict[str, Any]]:
    """The steps of all workflows."""
    return [step for path in WORKFLOWS for job in read(path)[0]["jobs"].values() for step in job["steps"]]


def test_actions_are_pinned_by_commit() -> None:
    uses = [line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text())]
    assert len(uses) == sum("uses" in step for step in steps())
    assert [line for line in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_table_of_a_pull_request_reaches_its_comment(tmp_path: Path) -> None:
    """The steps run with other programs in place of the real ones; the base is compared as it was trained here."""
    text = "A  `$(false)` \"x\" 'y' \\n\n\n| a | b |\n| --- | --- |\n| 1 → 2 | ${HOME} |"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "table").write_text(text)
    (tmp_path / "dvc.lock").write_text("stale")
    for command in ("git init -q", "git add dvc.lock", "git -c user.name=x -c user.email=x commit -q -m base"):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    for name, script in (
        (".venv/bin/make", "true"),
        (".venv/bin/dvc", "echo trained > dvc.lock"),
        (".venv/bin/gradtrail", 'git show "$2:dvc.lock" > called; echo "$1 $3 $4" >> called; cat table'),
        (".venv/bin/gh", 'printf "%s\\0" "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    train, compare, comment = (
        [step for step in steps() if step.get("name") == name] for name in ("Train the base", "Compare", "Comment")
    )
    files = {name: str(tmp_path / name) for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    path = f"{tmp_path / '.venv/bin'}:/usr/bin:/bin"

    def run(step: dict[str, Any], **variables: str) -> str:
        command = ["bash", "-e", "-c", step["run"]]
        env = {"PATH": path, **variables}
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    run(train[0], BASE="HEAD", **files)
    run(compare[0], **dict([(tmp_path / "GITHUB_ENV").read_text().strip().split("=")]), **files)
    assert (tmp_path / "called").read_text() == "trained\ndiff workspace --markdown\n"
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text() == text
    match = re.fullmatch(r"table<<(\w+)\n(.*)\n\1\n", (tmp_path / "GITHUB_OUTPUT").read_text(), re.DOTALL)
    assert match
    assert match[2] == text
    arguments = run(comment[0], NUMBER="7", TABLE=match[2]).split("\0")
    assert arguments[:3] == ["pr", "comment", "7"]
    assert arguments[arguments.index("--body") + 1] == text


def test_selectors_ports_and_volumes_meet() -> None:
    sets = [document["spec"] for document in documents() if document["kind"] in ("Deployment", "StatefulSet")]
    services = [document["spec"] for document in documents() if document["kind"] == "Service"]
    assert len(services) == len(sets)
    for spec in sets:
        labels, (container,) = spec["template"]["metadata"]["labels"], spec["template"]["spec"]["containers"]
        assert spec["selector"]["matchLabels"] == labels
        (service,) = (service for service in services if service["selector"] == labels)
        ports = {port[key] for port in container["ports"] for key in ("name", "containerPort")}
        assert {port.get("targetPort", port["port"]) for port in service["ports"]} <= ports
    for pod in pods():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | {*pod["claims"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_pods_are_confined() -> None:
    for pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["enableServiceLinks"] is False, "they set MLFLOW_PORT to no number"


def test_no_file_holds_a_secret() -> None:
    """Secrets are referred to by name: a variable with the name of a credential has no value of its own."""
    for document in documents():
        assert document["kind"] != "Secret"
        assert not any(CREDENTIAL.search(key) for key in document.get("data", {}))
    for pod in pods():
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", []):
                assert not (CREDENTIAL.search(variable["name"]) and "value" in variable)
    for service in services().values():
        for name, value in service["environment"].items():
            if CREDENTIAL.search(name) and name != "RAY_AUTH_MODE":
                assert re.fullmatch(r"\$\{\w+:\?\}", value), f"{name} must come from the environment, and be set"


def test_compose_publishes_only_on_loopback() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert {port.rpartition(":")[2] for port in published} == {"5000", "8080", "8265"}
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_names_of_the_server_are_those_of_its_manifests() -> None:
    """The paths of the probes, the metric of the autoscaler."""
    metrics = ServerMetrics()
    paths = {route.path for route in create_app(Router(batching=BatchingConfig(), metrics=metrics)).routes}
    kinds = {document["kind"]: document for document in read(DEPLOY / "kubernetes" / "server.yaml")}
    deployment = kinds["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {probe["path"] for probe in probes} <= paths
    assert {probe["port"] for probe in probes} == {kinds["Service"]["spec"]["ports"][0]["targetPort"]} == {port["name"]}
    target = kinds["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    (metric,) = kinds["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in {family.name for family in metrics.registry.collect()}


def test_server_knows_the_arguments_of_its_image_and_manifests() -> None:
    """Of Compose and Kubernetes too, if they have any, which then replace those of the image."""
    (default,) = re.findall(r"^CMD (.*)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    (container,) = read(DEPLOY / "kubernetes" / "server.yaml")[0]["spec"]["template"]["spec"]["containers"]
    given = [json.loads(default), services()["server"].get("command"), container.get("args")]
    (line,) = re.findall(r'^exec gradtrail serve (.*) "\$@"$', (DEPLOY / "serve.sh").read_text(), re.MULTILINE)
    for arguments in filter(None, given):
        assert serve.make_context("serve", [*line.split(), *arguments]).params["host"] == "0.0.0.0"  # noqa: S104


def test_ray_of_the_cluster_has_the_version_of_its_lock() -> None:
    (job,) = (document for document in documents() if document["kind"] == "RayJob")
    lock = (ROOT / "locks/cluster.lock").read_text().replace("[default]", "")
    assert f"\nray=={job['spec']['rayClusterSpec']['rayVersion']} " in lock


def test_lock_of_the_server_has_what_it_imports_at_the_versions_of_the_base() -> None:
    locked = (ROOT / "locks" / "serve.lock").read_text().split()
    assert {*locked} <= {*re.findall(r"^\S+==\S+", (ROOT / "locks" / "base.lock").read_text(), re.MULTILINE)}
    graph = grimp.build_graph("gradtrail", include_external_packages=True, cache_dir=None)
    modules = graph.find_upstream_modules("gradtrail.serving.serve")
    imported = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"gradtrail"}
    distributions = packages_distributions()
    names = {name: {re.sub(r"[-_.]+", "-", one).lower() for one in distributions[name]} for name in imported}
    packages = {line.partition("==")[0] for line in locked}
    assert {name for name in imported if not names[name] & packages} == NEVER_IMPORTED


@pytest.mark.parametrize("missing", ["MLFLOW_BACKEND_STORE_URI", "MLFLOW_TRACKING_PASSWORD"])
def test_mlflow_does_not_start_without_its_secrets(missing: str, tmp_path: Path) -> None:
    names = ("BACKEND_STORE_URI", "ARTIFACTS_DESTINATION", "FLASK_SERVER_SECRET_KEY", "TRACKING_USERNAME")
    env = {f"MLFLOW_{name}": "x" for name in (*names, "TRACKING_PASSWORD")} | {"PATH": str(tmp_path)}
    del env[missing]
    done = subprocess.run(["/bin/sh", DEPLOY / "mlflow.sh"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"mlflow.sh: {missing} is not set\n")


def test_mlflow_starts_with_authentication_on_loopback_without_passwords_in_arguments(tmp_path: Path) -> None:
    """Python's parser takes a single % for the beginning of a reference."""
    (tmp_path / "mlflow").write_text('#!/bin/sh\necho "$@"\ncat "$MLFLOW_AUTH_CONFIG_PATH"\n')
    (tmp_path / "mlflow").chmod(0o755)
    uri, user = "postgresql://a:hidden%40%(x)s@b/c", "50% of me"
    env = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_ARTIFACTS_DESTINATION": "x", "MLFLOW_FLASK_SERVER_SECRET_KEY": "x"}
    env |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": "very-secret"}
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    command = ["/bin/sh", DEPLOY / "mlflow.sh"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    arguments, *config = done.stdout.splitlines()
    assert "--app-name basic-auth" in arguments
    assert "--host 127.0.0.1" in arguments
    assert "hidden" not in arguments
    assert "very-secret" not in done.stdout
    assert "authorization_function = mlflow.server.auth:authenticate_request_basic_auth" in config
    (written,) = (path for path in tmp_path.iterdir() if path.name != "mlflow")
    assert written.stat().st_mode & 0o077 == 0
    read = configparser.ConfigParser()
    read.read_string("\n".join(config))
    assert (read["mlflow"]["database_uri"], read["mlflow"]["admin_username"]) == (uri, user)


def test_git_ignores_the_variables_of_compose() -> None:
    assert "/deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()
