"""`dvc.yaml` says exactly what each stage reads: its import closure, its sections of `params.yaml`, its data."""

import ast
from pathlib import Path

import pytest
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.stages.common.pipeline_file import is_code, read_pipeline
from gradtrail.stages.report.inputs import READS, WRITES
from gradtrail.tracking.mlflow.models import import_closure

PIPELINE = read_pipeline(ROOT / "dvc.yaml")
PARAMS = YAML(typ="safe", pure=True).load(ROOT / "params.yaml")
VERSIONS = set(YAML(typ="safe", pure=True).load(ROOT / "versions.yaml"))

# Code that a stage imports and that cannot change an out. That tracking, progress and the section `runtime` change no
# byte is tested with the real stages; the others decide what a row in MLflow is called, or whether a stage starts.
EXEMPT = frozenset(
    f"src/gradtrail/io/{name}.py"
    for name in (
        "checkpoints",  # written to MLflow alone
        "accelerator",
        "compile_cache",
        "compile_profiles",
        "figures/roofline",
        "curves",
        "digests",
        "errors",
        "git",
        "identity",
        "interruption",
        "leaks",
        "memory",
        "metric_names",
        "progress",
        "rows",
        "runtime",
        "states",
        "store",
        "store_calls",
        "timings",  # go to MLflow alone; `core/profile/benchmark.py` and `figures/timings.py` serve nothing else
        "traces",
        "tracking",
        "versions",
        "workspace",
    )
)


# What the page shows of digests follows from the code that computes them.
SHOWN = {"report": frozenset({"src/gradtrail/stages/common/digests.py"})}
TEMPLATES = {"report": {"src/gradtrail/io/templates/report.html.j2"}}


def code_of(stage: str) -> set[str]:
    """The code that can change an out of a stage."""
    closure = import_closure(ROOT / "pipeline" / f"{stage}.py", ROOT, stop_at=EXEMPT - SHOWN.get(stage, frozenset()))
    return closure | TEMPLATES.get(stage, set())


@pytest.mark.parametrize("stage", PIPELINE)
def test_code_deps_are_the_import_closure(stage: str) -> None:
    listed = {dep for dep in PIPELINE[stage].deps if is_code(dep)}
    assert sorted(listed) == sorted(code_of(stage)), (
        f"deps of {stage} in dvc.yaml should list the files that it imports"
    )


@pytest.mark.parametrize("stage", PIPELINE)
def test_data_deps_are_outs_of_earlier_stages(stage: str) -> None:
    earlier = [out for name in list(PIPELINE)[: list(PIPELINE).index(stage)] for out in PIPELINE[name].outs]
    data = [dep for dep in PIPELINE[stage].deps if not is_code(dep)]
    assert all(any(dep == out or dep.startswith(f"{out}/") for out in earlier) for dep in data)


@pytest.mark.parametrize("stage", PIPELINE)
def test_params_are_the_sections_that_the_script_loads(stage: str) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse((ROOT / "pipeline" / f"{stage}.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "stage.params"
    ]
    loaded = {ast.literal_eval(call.args[1]) if len(call.args) > 1 else stage for call in calls}
    if stage == "report":  # which shows the params of all stages as they stand
        loaded |= set(PIPELINE)
    assert set(PIPELINE[stage].params["params.yaml"]) == loaded
    assert "runtime" not in loaded


@pytest.mark.parametrize("stage", PIPELINE)
def test_one_name_for_stage_script_section_and_metrics(stage: str) -> None:
    assert (ROOT / "pipeline" / f"{stage}.py").is_file()
    assert stage in PARAMS
    assert f"metrics/{stage}.json" in PIPELINE[stage].outs
    assert PIPELINE[stage].cmd == f"sh pipeline/stage.sh {stage}"


@pytest.mark.parametrize("stage", PIPELINE)
def test_versions_are_those_of_the_packages_that_the_stage_computes_with_or_shows(stage: str) -> None:
    listed = set(PIPELINE[stage].params["versions.yaml"])
    if stage == "report":
        assert listed == VERSIONS
        return
    closure = code_of(stage)
    imported = {
        name.split(".")[0]
        for file in closure
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    computing = imported & {"jax", "flax", "optax", "numpy"}
    assert listed == computing | ({"jaxlib"} if "jax" in computing else set())


def test_the_lineage_that_the_report_shows_is_that_of_the_pipeline() -> None:
    others = {name: spec for name, spec in PIPELINE.items() if name != "report"}
    reads = {name: tuple(dep for dep in spec.deps if not is_code(dep)) for name, spec in others.items()}
    assert reads == READS
    assert {name: spec.outs for name, spec in others.items()} == WRITES


def test_the_report_depends_on_every_file_whose_digest_it_shows() -> None:
    data = {dep for dep in PIPELINE["report"].deps if not is_code(dep)}
    assert data == {out for outs in WRITES.values() for out in outs}


def test_every_section_belongs_to_a_stage_or_is_runtime() -> None:
    assert set(PARAMS) == {*PIPELINE, "runtime"}


def test_init_files_hold_no_logic() -> None:
    inits = [*(ROOT / "src").rglob("__init__.py"), ROOT / "pipeline" / "__init__.py"]
    assert inits
    assert all(not Path(path).read_text().strip() for path in inits)
