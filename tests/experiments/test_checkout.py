"""`gradtrail checkout` brings back what a run read and wrote, or says what is missing and changes nothing."""

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from projects import ROOT, Project
from small_project import finished_small_project

from gradtrail.experiments.checkout import checkout
from gradtrail.stages.common.files import digest
from gradtrail.stages.common.pipeline_file import locked_entry, output_digests, read_locks
from gradtrail.support.errors import UserError
from gradtrail.tracking.state import state_key
from gradtrail.tracking.working_diff import NOT_IN_GIT

LR = "train.adamw.learning_rate"
MODEL, TRAINED = "models/final.safetensors", "results/metrics/train.json"
CODE, NEW = "src/gradtrail/core/third.py", "src/gradtrail/core/new.py"
AUDIT = """stages:
  audit:
    wdir: ../..
    cmd: sh pipeline/stage.sh audit
    deps: [models/final.safetensors, pipeline/audit.py]
    params: [pipeline/audit/params.yaml: [audit]]
    outs: [results/audit/words.txt]
    metrics: [{results/metrics/audit.json: {cache: false}}]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """On its branch again, after an experiment and a run with uncommitted changes."""
    project = finished_small_project().copy(tmp_path_factory.mktemp("checkout") / "project")
    project.dvc("exp", "run", "--temp", "-S", f"{LR}=0.5", "--name", "higher")
    project.set(LR, 0.25)
    source = project.folder / CODE
    source.write_text(source.read_text().replace("third", "third of another kind"))
    (project.folder / NEW).write_text("NEW = 1\n")
    project.dvc("repro", "evaluate")
    project.git("checkout", "-q", ".")
    (project.folder / NEW).unlink()
    project.dvc("checkout")
    return project


@pytest.fixture
def project(finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it; what a test calls in this process is called in it."""
    project = finished.copy(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return project


def run_of(project: Project, stage: str, learning_rate: float) -> dict[str, Any]:
    (run,) = (run for run in project.runs_of(stage) if run["params"][LR] == str(learning_rate))
    return run


def files_of(project: Project) -> dict[str, str]:
    """Return the digest of each file that git or DVC could change, and the commit and branch."""
    folders = ("src", "pipeline", "data", "models", "results")
    names = [
        *project.folder.glob("*.*"),
        *(path for folder in folders for path in project.folder.rglob(f"{folder}/**/*")),
    ]
    files = {str(path): digest(path) for path in names if path.is_file() and "mlflow" not in path.name}
    own = {path: md5 for path, md5 in files.items() if "__pycache__" not in path}
    return own | {"HEAD": (project.folder / ".git/HEAD").read_text()}


def outs_of(project: Project, run: dict[str, Any]) -> dict[str, str]:
    return project.digests(*run["outs"])


def recorded_states(project: Project) -> dict[str, str]:
    """Return stage → state, as `dvc.lock` has them."""
    return {name: state_key(name, locked_entry(one)) for name, one in read_locks(project.folder).items()}


def way_back(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("to go back: "))
    return line.removeprefix("to go back: ")


def test_run_with_uncommitted_changes_is_brought_back_and_git_leads_back(project: Project) -> None:
    train, run, before = run_of(project, "train", 0.25), run_of(project, "evaluate", 0.25), files_of(project)
    output = project.gradtrail("checkout", run["id"][:8])
    assert project.git("status", "--porcelain") == ""
    for one in (train, run):
        assert outs_of(project, one) == one["outs"]
    assert project.get(LR) == 0.25
    assert "another kind" in (project.folder / CODE).read_text()
    assert (project.folder / NEW).is_file()
    states, locked = recorded_states(project), read_locks(project.folder)
    assert {"train": states["train"], "evaluate": states["evaluate"]} == {
        one["tags"]["stage"]: one["tags"]["state"] for one in (train, run)
    }
    assert output_digests(locked["evaluate"]) == run["outs"]
    changed = [line.strip(":") for line in project.dvc("status").splitlines() if not line.startswith("\t")]
    assert changed == ["gradients"], "it is not of the run, and read another model"

    commit = project.git("rev-parse", "HEAD")
    assert checkout(run["id"], Path(), allow_missing=False) == 0
    assert project.git("rev-parse", "HEAD") == commit, "the same run is the same commit"
    project.run("sh", "-c", way_back(output))
    assert files_of(project) == before


def test_committed_run_is_brought_back_without_leaving_the_branch(project: Project) -> None:
    (run,) = (run for run in project.runs_of("evaluate") if run["params"][LR] not in ("0.5", "0.25"))
    before = files_of(project)
    for out in run["outs"]:
        (project.folder / out).unlink()
    project.git("checkout", "-q", ".")
    output = project.gradtrail("checkout", run["tags"]["state"])
    assert files_of(project) == before
    assert "to go back" not in output


def cached_file(md5: str) -> str:
    return f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("params.yaml", b"edited", r"^params.yaml: has uncommitted changes; commit them"),
        (TRAINED, b"", rf"^{TRAINED}: has uncommitted changes"),
        (NEW, b"", rf"^{NEW}: not in git, and the run has a file in its place"),
        (MODEL, b"", rf"^{MODEL}: not in DVC's cache, and the run has another"),
        (f"cached {MODEL}", None, rf"^not in DVC's cache: {MODEL} \([0-9a-f]{{32}}\); .*--allow-missing"),
        (f"cached {TRAINED}", None, rf"^not in DVC's cache: {TRAINED} \([0-9a-f]{{32}}\); "),
        ("git.diff", None, "ran with changes of commit [0-9a-f]{12}, and its git.diff is missing$"),
        (
            "git.diff",
            f"{NOT_IN_GIT}pipeline/a.npz\n".encode(),
            rf"has not what the run read: {CODE}; {NOT_IN_GIT}pipeline/a.npz$",
        ),
        ("git.diff", b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\n+b\n", "git apply"),
    ],
)
def test_what_is_missing_or_would_be_lost_is_named_and_nothing_changes(
    name: str, content: bytes | None, message: str, finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = run_of(finished, "evaluate", 0.25)
    places = {f"cached {out}": cached_file(md5) for out, md5 in run_of(finished, "train", 0.25)["outs"].items()}
    path = Path(places.get(name, f"mlruns/{run['id']}/artifacts/git.diff" if name == "git.diff" else name))
    original = path.read_bytes() if path.exists() else None
    put(path, content)
    before = files_of(finished)
    try:
        with pytest.raises(UserError, match=message):
            checkout(run["id"], Path(), allow_missing=False)
        assert files_of(finished) == before
    finally:
        put(path, original)


def put(path: Path, content: bytes | None) -> None:
    """Replace a file; None removes it."""
    path.unlink(missing_ok=True)  # it may be a link to DVC's cache
    if content is not None:
        path.write_bytes(content)


def in_store(project: Project, statement: str, run_id: str = "") -> None:
    with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as store, store:
        store.execute(statement, {"run": run_id})


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "update tags set value = 'abcdef' where key = 'mlflow.source.git.commit' and run_uuid = :run",
            "commit abcdef is not in this repository; `git fetch` may bring it",
        ),
        ("delete from tags where key = 'mlflow.source.git.commit' and run_uuid = :run", "it has no commit"),
        ("update runs set name = :run", r"^(\w+): 9 runs; `gradtrail show \1` lists them$"),
    ],
)
def test_run_without_a_commit_and_name_of_several_runs_are_refused(
    statement: str, message: str, project: Project
) -> None:
    run_id = run_of(project, "evaluate", 0.25)["id"]
    in_store(project, statement, run_id)
    before = files_of(project)
    with pytest.raises(UserError, match=message):
        checkout(run_id, Path(), allow_missing=False)
    assert files_of(project) == before


@pytest.mark.slow
def test_untracked_code_is_part_of_what_a_stage_reads(project: Project) -> None:
    """An untracked file in a folder that a stage reads gives it another state than that of the run."""
    (project.folder / "dvc.yaml").write_text(
        (project.folder / "dvc.yaml").read_text().replace("src/gradtrail/core/third.py", "src/gradtrail/core")
    )
    project.dvc("repro", "evaluate")
    project.commit("a folder as a dep")
    run = project.runs_of("evaluate")[0]
    (project.folder / NEW).write_text("NEW = 2\n")
    with pytest.raises(UserError, match=rf"src/gradtrail/core; untracked: {NEW}"):
        checkout(run["id"], Path(), allow_missing=False)


@pytest.mark.slow
def test_experiment_is_brought_back_with_all_its_stages_and_without_its_commit_too(project: Project) -> None:
    before = files_of(project)
    trained = run_of(project, "train", 0.5)
    output = project.gradtrail("checkout", "higher")
    assert project.dvc("status").strip() == "Data and pipelines are up to date."
    for stage in ("train", "evaluate", "gradients"):
        run = run_of(project, stage, 0.5)
        assert outs_of(project, run) == run["outs"]
    project.run("sh", "-c", way_back(output))
    assert files_of(project) == before

    project.dvc("exp", "remove", "higher")
    project.gradtrail("checkout", trained["id"])
    assert outs_of(project, trained) == trained["outs"]
    assert recorded_states(project)["train"] == trained["tags"]["state"]
    assert project.get(LR) == 0.5


@pytest.mark.slow
def test_run_whose_code_is_lost_is_brought_back_with_code_that_wrote_the_same(project: Project) -> None:
    """A run that sync made of a `dvc.lock` that was committed with other code has no diff."""
    run, script = project.runs_of("evaluate")[-1], project.folder / "pipeline/evaluate.py"
    script.write_text(f"{script.read_text()}# a comment\n")
    project.git("commit", "-aq", "--amend", "--no-edit")
    in_store(project, "update tags set value = 'true' where key = 'git.dirty' and run_uuid = :run", run["id"])
    with pytest.raises(UserError, match=r"its git.diff is missing$"):
        checkout(run["id"], Path(), allow_missing=False)
    project.dvc("repro")
    project.commit("a lock of this code")
    project.delete_run(project.runs_of("evaluate")[0]["id"])
    before = files_of(project)
    project.gradtrail("checkout", run["id"])
    assert files_of(project) == before


@pytest.mark.slow
def test_run_of_an_optional_pipeline_is_brought_back_with_its_lock(project: Project) -> None:
    script = (project.folder / "pipeline/evaluate.py").read_text()
    for old, new in (("'evaluate'", "'audit'"), ("results/evaluate", "results/audit"), ("calibration_bins", "folds")):
        script = script.replace(old, new)
    (project.folder / "pipeline/audit.py").write_text(script)
    (project.folder / "pipeline/audit").mkdir()
    (project.folder / "pipeline/audit/dvc.yaml").write_text(AUDIT)
    shutil.copy(ROOT / "pipeline/audit/params.yaml", project.folder / "pipeline/audit")
    project.commit("an optional pipeline")
    project.gradtrail("repro", "pipeline/audit/dvc.yaml")
    (run,) = project.runs_of("audit")
    assert run["params"]["audit.folds"] == "2"
    assert "audit." not in run["name"], "its params are those of the commit"
    with pytest.raises(UserError, match=r"^pipeline/audit/.dvcignore: not in git"):
        checkout(run["id"], Path(), allow_missing=False)
    project.git("clean", "-fdq", "pipeline", "results")
    shutil.rmtree(project.folder / "results/audit")
    project.gradtrail("checkout", run["id"])
    assert outs_of(project, run) == run["outs"]
    assert project.dvc("status").strip() == "Data and pipelines are up to date."
    assert recorded_states(project)["audit"] == run["tags"]["state"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dvc repro", "dvc pull"])
def test_missing_outs_are_computed_or_pulled_after_the_rest_is_there(
    way: str, project: Project, tmp_path: Path
) -> None:
    run = run_of(project, "train", 0.25)
    if way == "dvc pull":
        project.dvc("remote", "add", "--default", "--local", "far", str(tmp_path / "far"))
        output = project.gradtrail("checkout", run["id"])
        project.dvc("push", "train")
        project.run("sh", "-c", way_back(output))
    shutil.rmtree(project.folder / ".dvc/cache/runs")
    (project.folder / cached_file(run["outs"][MODEL])).unlink()
    output = project.gradtrail("checkout", run["id"], "--allow-missing")
    assert f"missing: {MODEL}; " in output
    assert ("`dvc pull` fetches" in output) == (way == "dvc pull")
    assert outs_of(project, run) != run["outs"]
    project.dvc(*way.split()[1:], "train")
    assert outs_of(project, run) == run["outs"]
