"""`gradtrail diff` on a real store: what it reports of two runs; timed comparisons leave nothing behind."""

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array
from projects import Project, finished_project

from gradtrail.experiments import diff
from gradtrail.experiments.diff import edits, find_details, program_digest
from gradtrail.support.errors import UserError

MATRIX = jnp.ones((17, 17))  # no other test compiles its programs, which JAX's cache would return without source lines


def hlo(function: Callable[[Array], Array]) -> str:
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)  # so that the text has source lines
    try:
        return str(jax.jit(function).lower(MATRIX).compile().as_text())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


TEXT = hlo(lambda inputs: jnp.tanh(inputs @ MATRIX))


@given(shift=st.integers(0, 10**6), lines=st.integers(1, 500))
def test_digest_of_a_program_ignores_names_and_source_lines(shift: int, lines: int) -> None:
    renamed = re.sub(r"%([\w-]+)\.(\d+)", lambda name: f"%{name[1]}.{int(name[2]) + shift}", TEXT)
    moved = re.sub(r"\bline=(\d+)", lambda line: f"line={int(line[1]) + lines}", renamed)
    assert moved != TEXT
    assert program_digest(moved) == program_digest(TEXT)


def test_digest_of_another_program_differs() -> None:
    others = (lambda inputs: jnp.tanh(inputs @ MATRIX + 1), lambda inputs: jnp.tanh(inputs @ MATRIX @ MATRIX))
    assert len({program_digest(text) for text in (TEXT, *map(hlo, others))}) == 3


def test_same_uncommitted_edit_of_both_runs_is_no_difference() -> None:
    both = "diff --git a/one.py b/one.py\n+ 1\n"
    before, after = edits(both), edits(both + "diff --git a/two.py b/two.py\n+ 2\n")
    assert before["one.py"] == after["one.py"]
    assert after.keys() - before.keys() == {"two.py"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project on digits with a second attempt of its training, and another training with a larger batch."""
    project = finished_project().copy(tmp_path_factory.mktemp("diff") / "project")
    project.dvc("repro", "--force", "--single-item", "train")
    batch_size = int(re.search(r"  batch_size: (\d+)", (project.folder / "params.yaml").read_text())[1])  # type: ignore[index]
    project.set("train.batch_size", 2 * batch_size)
    project.dvc("repro", "--single-item", "train")
    return project


@pytest.mark.slow
def test_larger_batch_is_reported(project: Project) -> None:
    new, old = project.runs_of("train")[:2]
    output = project.gradtrail("diff", old["id"][:8], "workspace").splitlines()
    assert output[0].startswith("A  ")
    assert re.search(r": (\w+( \w+)? [+-]\d+(\.\d+)? s(, )?){3}; cached: \d of 4, then \d of 4$", output[2])
    assert output[3].startswith("train.batch_size can explain only the training loop")
    assert any(line.strip().startswith("train_step") and " other " in line for line in output)
    assert any("train.batch_size" in line for line in output)
    texts = [line.strip() for line in output[output.index("programs of train_step:") + 1 :][:2]]
    assert [Path(text.removeprefix("file://")).read_text()[:9] for text in texts] == ["HloModule"] * 2
    result = json.loads(project.gradtrail("diff", old["tags"]["state"], new["id"], "--json"))
    assert [one["id"] for one in result["runs"]] == [old["id"], new["id"]]
    assert [row["key"] for row in result["params"]] == ["train.batch_size"]
    (step,) = [row for row in result["functions"] if row["function"] == "train_step"]
    assert step["program"] == "other"
    assert step["FLOPs"][1] > 1.5 * step["FLOPs"][0]


@pytest.mark.slow
def test_markdown_has_the_numbers_of_both_runs_and_their_difference(project: Project) -> None:
    new, old = project.runs_of("train")[:2]
    text = project.gradtrail("diff", old["id"], new["id"], "--markdown")
    tables = {part.partition("\n")[0]: part for part in text.split("### ")[1:]}
    assert list(tables) == ["metrics", "params", "seconds", "memory", "functions"]
    for name in ("train/accuracy", "train/loss"):
        cells = re.search(rf"^\| {name} \| (.*) \|$", tables["metrics"], re.MULTILINE)[1].split(" | ")  # type: ignore[index]
        before, after = (run["metrics"][name] for run in (old, new))
        assert [float(cell) for cell in cells] == pytest.approx([before, after, after - before], rel=1e-3, abs=1e-9)
    assert re.search(
        r"^\| eval/accuracy \| 0\.\d+ \| – \| – \|$", tables["metrics"], re.MULTILINE
    )  # B is not evaluated
    assert not re.search(r"^\| (system/|train/seconds|train/compile)", tables["metrics"], re.MULTILINE)
    for part in tables.values():
        assert len({line.count("|") for line in part.strip().splitlines()[2:]}) == 1


@pytest.mark.slow
def test_attempts_of_one_state_have_equal_programs_and_separate_times(project: Project) -> None:
    old = project.runs_of("train")[1]["id"]
    result = json.loads(project.gradtrail("diff", f"{old}@1", f"{old}@2", "--json"))
    assert {row["program"] for row in result["functions"]} == {"same"}
    *parts, total = result["seconds"]
    assert sum(row["B − A"] for row in parts) == pytest.approx(total["B − A"], abs=0.05)
    assert any(row["B − A"] != 0 for row in parts)
    assert result["params"] == result["data"] == result["code"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "stage", "message"),
    [
        ("workspase", None, "workspase: no run has this name"),
        ("HEAD~99", None, "HEAD~99"),
        ("workspace@9", None, "workspace@9: the run has attempts 1 to"),
        ("workspace", "trian", "trian"),
        ("EVALUATION", None, "the runs are of the stages train and evaluate"),
    ],
)
def test_bad_input_is_one_line(
    project: Project, other: str, stage: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    evaluation = project.runs_of("evaluate")[0]["id"]
    with pytest.raises(UserError, match=message):
        find_details(["workspace", evaluation if other == "EVALUATION" else other], stage)


@pytest.mark.slow
def test_note_names_missing_artifacts_of_a_rebuilt_run(project: Project, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "copy")
    copy.empty_store()
    copy.sync()
    output = copy.gradtrail("diff", "workspace", "workspace")
    assert "was rebuilt from its outputs: it has no times, programs or environment" in output


@pytest.fixture
def timed_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    project = finished_project().copy(tmp_path / "project")
    project.sync()  # says that the store was moved
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return project


def left_behind(project: Project) -> list[Path]:
    return [*(project.folder.parent / "scratch").glob("gradtrail-timed-*")]


@pytest.mark.nightly
def test_timing_a_program_against_itself_leaves_nothing(timed_project: Project) -> None:
    before = timed_project.git("status", "--porcelain")
    result = json.loads(timed_project.gradtrail("diff", "workspace", "HEAD", "--time", "--seconds", "1", "--json"))
    timed = result["timed"]
    assert timed["low"] < timed["ratio"] < timed["high"]
    assert timed["num_processes"] == 3
    assert timed["num_bursts"] >= 3 * 30
    assert left_behind(timed_project) == []
    assert timed_project.git("status", "--porcelain") == before


@pytest.mark.slow
def test_failed_timing_is_one_line_and_leaves_nothing(timed_project: Project, tmp_path: Path) -> None:
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text(
        '#!/bin/sh\n[ "$1" != -c ] || exit 0\necho "ModuleNotFoundError: No module named \'jax\'" >&2\nexit 1\n'
    )
    bare.chmod(0o755)
    for arguments, words in (
        (["--python-b", str(bare)], "No module named 'jax'"),
        (["--stage", "evaluate"], "only trainings can be timed"),
    ):
        line = timed_project.gradtrail("diff", "workspace", "HEAD", "--time", *arguments, status=2).strip()
        assert line.startswith("gradtrail: ")
        assert words in line
        assert "\n" not in line
    assert left_behind(timed_project) == []


@pytest.mark.slow
def test_stopped_timing_leaves_nothing(timed_project: Project) -> None:
    process = timed_project.start("gradtrail", "diff", "workspace", "HEAD", "--time", "--seconds", "600")
    while not left_behind(timed_project):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert left_behind(timed_project) == []


@pytest.mark.parametrize(
    ("signature", "sizes"),
    [
        ("float32[784,256], uint8[55000,28,28], int32[55000]", ("55000", "28", "28", None)),
        ("uint8[50000,32,32,3], int32[50000]", ("50000", "32", "32", "3")),
        ("uint8[64,128,28,28], int32[64,128]", None),
        ("uint8[64,128,32,32,3], int32[64,128]", None),
    ],
    ids=["grayscale", "color", "streamed", "streamed in color"],
)
def test_shape_of_the_data_is_that_of_the_whole_split(signature: str, sizes: tuple[str | None, ...] | None) -> None:
    match = diff._IMAGES.search(signature)
    assert (match and match.groups()) == sizes
