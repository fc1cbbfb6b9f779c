"""`dvc.yaml` says exactly what each stage reads: the code that it imports, its params, its data."""

import ast
import functools
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest
from packaging.utils import canonicalize_name
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.stages.common.params import params_file, read_params
from gradtrail.stages.common.pipeline_file import FILES, PARAMS_FILES, is_code, read_pipelines, stages_before

PIPELINE = read_pipelines(ROOT)
DECLARED = {
    stage: declared
    for name in FILES[::2]
    for stage, declared in YAML(typ="safe", pure=True).load(ROOT / name)["stages"].items()
}
VERSIONS = set(YAML(typ="safe", pure=True).load(ROOT / "pipeline/versions.yaml"))
DISTRIBUTIONS = packages_distributions()
WRITTEN_BY_PEOPLE = ("pipeline/corrections.csv",)
CANNOT_CHANGE_AN_OUT = ("gradtrail.support", "gradtrail.tracking")  # contracts/results/test_environment.py shows it
HARMLESS = {  # packages that lock, check, or carry bytes whose digest is compared; every other one can change an out
    *("filelock", "jaxtyping", "orbax-checkpoint", "platformdirs", "pydantic", "requests"),
    *("ruamel-yaml", "ruamel-yaml-clib", "urllib3"),
}
DELEGATES = {  # module → packages that compute or write for it, unseen by the import graph
    "jax": {"jaxlib", "opt-einsum"},
    "matplotlib": {"kiwisolver", "pillow"},
    "pandas": {"pyarrow"},
    "gradtrail.stages.export": {"flatbuffers"},  # by which jax.export serializes
}


@functools.cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(
        "gradtrail", "pipeline", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


@functools.cache
def closure_of(stage: str) -> frozenset[str]:
    """The modules and packages that a stage's script imports, directly or not, of those that can change an out."""
    modules, waiting = set[str](), [f"pipeline.{stage}"]
    while waiting:
        module = waiting.pop()
        if module not in modules and not module.startswith(CANNOT_CHANGE_AN_OUT):
            modules.add(module)
            waiting += imports().find_modules_directly_imported_by(module)
    return frozenset(modules)


@pytest.mark.parametrize("stage", PIPELINE)
def test_code_deps_are_the_folders_and_modules_that_the_script_imports(stage: str) -> None:
    """Folders of `core` and `stages` as a whole, and modules that lie beside them."""
    package = [module.split(".") for module in closure_of(stage) if module.startswith("gradtrail.")]
    places = [Path("src", *parts[:3]) for parts in package]
    code = {place.as_posix() if (ROOT / place).is_dir() else f"{place.as_posix()}.py" for place in places}
    if "gradtrail.core.nn.own" in closure_of(stage) and stage != "audit":  # its network is not that of `train`
        code |= {"pipeline/networks"}
    assert {dep for dep in PIPELINE[stage].deps if is_code(dep)} == code | {f"pipeline/{stage}.py"}


@pytest.mark.parametrize("stage", PIPELINE)
def test_params_are_the_sections_that_the_script_loads(stage: str) -> None:
    modules, stages = [f"{stage}.py", f"{stage}/*.py"], ROOT / "src/gradtrail/stages"
    scripts = [ROOT / f"pipeline/{stage}.py", *(path for pattern in modules for path in stages.glob(pattern))]
    calls = [
        node
        for script in scripts
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "stage.params"
    ]
    loaded = {ast.literal_eval(call.args[1]) if len(call.args) > 1 else stage for call in calls}
    if stage == "report":  # which shows the params of all stages as they stand
        loaded |= {*stages_before("report", PIPELINE), "environment"}
    if "jax" in PIPELINE[stage].params["pipeline/versions.yaml"]:  # it computes: see `Stage.set_up`
        loaded.add("environment")
    declared = {(file, key) for file in PARAMS_FILES for key in PIPELINE[stage].params.get(file, ())}
    assert declared == {(str(params_file(section)), section) for section in loaded}
    assert "runtime" not in loaded


@pytest.mark.parametrize("stage", PIPELINE)
def test_dvc_restores_the_stage_from_its_run_cache(stage: str) -> None:
    """DVC keeps no entry for a stage with an out that git keeps, unless that is a metric of the stage."""
    assert all(isinstance(out, str) for out in DECLARED[stage]["outs"]), "outs without options, so DVC caches them"
    assert DECLARED[stage]["metrics"] == [{f"results/metrics/{stage}.json": {"cache": False}}]
    assert "always_changed" not in DECLARED[stage]


@functools.cache
def packages_of(stage: str) -> frozenset[str]:
    """The packages that a stage computes or writes with, and harmless ones."""
    modules = closure_of(stage)
    packages = {canonicalize_name(name) for module in modules & DISTRIBUTIONS.keys() for name in DISTRIBUTIONS[module]}
    return frozenset(packages).union(*(DELEGATES[module] for module in modules & DELEGATES.keys()))


@pytest.mark.parametrize("stage", PIPELINE)
def test_versions_are_those_of_the_packages_in_the_import_closure_that_can_change_an_out(stage: str) -> None:
    shown = VERSIONS if stage == "report" else set()
    assert set(PIPELINE[stage].params["pipeline/versions.yaml"]) == shown | packages_of(stage) - HARMLESS


def test_every_package_in_the_import_closures_is_either_recorded_or_harmless() -> None:
    packages = set().union(*map(packages_of, PIPELINE))
    assert packages == VERSIONS | HARMLESS
    assert not VERSIONS & HARMLESS


def test_the_report_depends_on_every_file_whose_digest_it_shows() -> None:
    before = stages_before("report", PIPELINE).values()
    assert set(PIPELINE["report"].data_deps) == {*WRITTEN_BY_PEOPLE, *(out for spec in before for out in spec.outs)}


def test_every_section_belongs_to_a_stage_or_to_all() -> None:
    assert set(read_params(ROOT)) == {*PIPELINE, "environment", "runtime"}
