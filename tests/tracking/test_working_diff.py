"""The changes of the working folder that the `git.diff` of a run restores; no secret is in it."""

from pathlib import Path

import pytest
from cluster_repository import run_git
from projects import ROOT

from gradtrail.stages.common.pipeline_file import is_code, read_pipelines
from gradtrail.tracking.tags import origin_tags
from gradtrail.tracking.working_diff import READ, working_diff


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in a folder of a repository, with one commit."""
    project = tmp_path / "repository" / "folder"
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    (project / "pipeline" / "audit").mkdir(parents=True)
    for name in ("pipeline/old.py", "pipeline/audit/dvc.lock", "notes.md"):
        (project / name).write_bytes("naïve\n".encode("latin-1"))
    (project / ".gitignore").write_text("*.ignored\n")
    git("-C", "..", "init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    return project


def git(*arguments: str) -> str:
    return run_git(Path(), *arguments)


SECRETS = (
    *(".env", ".env.local", "key.pem", "server.key", "id_rsa", "token.txt", "credentials.json", ".netrc", ".pypirc"),
    *("notes.md", ".dvc/config", "deploy/secret.yaml"),
)


def change(project: Path) -> dict[str, bytes]:
    """Change what a person may change; return the files that the diff is to restore, with their contents."""
    changed = {
        "pipeline/old.py": "naïf\n".encode("latin-1"),
        "pipeline/new.py": b"new = 1\n",
        "src/empty.py": b"",
        "pipeline/networks/ü *.py": b"no end of line",
        "src/staged.py": b"staged\n",
        "params.yaml": b"a: 1\n",
    }
    ignored = {
        "pipeline/audit/dvc.lock": b"x",
        "results/metrics/a.json": b"x",
        "src/x.ignored": b"x",
        "pipeline/a.npz": b"\0",
        "pipeline/data.csv": b"1\n" * 2**17,
        "pipeline/.env": b"TOKEN=secret\n",
    }
    ignored |= dict.fromkeys(SECRETS, b"secret\n")
    for name, content in (changed | ignored).items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(content)
    git("add", "src/staged.py")
    return changed


def test_a_diff_restores_changes_and_small_untracked_files_and_names_others(repository: Path, tmp_path: Path) -> None:
    changed = change(repository)
    before = git("status", "--porcelain")
    diff = working_diff()
    assert git("status", "--porcelain") == before, "git's own index is not changed"
    assert b"secret" not in diff
    named = [f"# not in git: pipeline/{name}".encode() for name in (".env", "a.npz", "data.csv")]
    assert diff.splitlines()[:3] == named
    (tmp_path / "git.diff").write_bytes(diff)
    git("stash", "--include-untracked")
    git("apply", "../../git.diff")
    assert {name: (repository / name).read_bytes() for name in changed} == changed
    assert (repository / "pipeline/audit/dvc.lock").read_bytes() != b"x"


def test_code_and_params_of_every_stage_are_in_the_diff() -> None:
    specs = read_pipelines(ROOT).values()
    read = {dep for spec in specs for dep in (*filter(is_code, spec.deps), *spec.params)}
    assert {path.partition("/")[0] for path in read} <= {*READ}


def test_file_that_no_stage_reads_makes_no_run_dirty(repository: Path) -> None:
    for name in SECRETS:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("secret")
    assert origin_tags()["git.dirty"] == "false"
    (repository / "pipeline" / "new.py").touch()
    assert origin_tags()["git.dirty"] == "true"


@pytest.mark.parametrize("alert", ["'https://hooks.example.com/secret'", 'notify --token secret "$HOME"'])
def test_diff_does_not_have_the_target_of_alerts(alert: str, repository: Path) -> None:
    (repository / "params.yaml").write_text(f"runtime:\n  alert: {alert}\n  trace: false\n")
    diff = working_diff()
    assert b"secret" not in diff
    assert b"+  alert: ''\n+  trace: false\n" in diff


def test_failing_git_is_a_warning_and_omits_only_the_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "famed-eel")
    assert origin_tags()["git.dirty"] == "false"
    (repository.parent / ".git/index").write_bytes(b"no index")
    assert origin_tags() == {"dvc.exp_name": "famed-eel"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: `git status` failed: ")
