"""`gradtrail repro`: run `dvc repro` in a clone or an unpacked archive, with or without a network."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

import gradtrail
from gradtrail.core.names import NETWORKS
from gradtrail.experiments.up_to_date import is_up_to_date, pipeline_stamp, remember
from gradtrail.stages.common.environment import (
    EnvironmentConfig,
    RuntimeConfig,
    has_common_bytes,
    refuse_variables,
    require_jax,
)
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import PARAMS, load_section, params_file
from gradtrail.stages.common.pipeline_file import FILES, PARAMS_FILES, sha256_of
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.datasets import DATASETS, stands_in_for, title
from gradtrail.support.errors import NO_SOURCE_FLAG, UserError, suggestion, with_store
from gradtrail.support.git import git
from gradtrail.support.paths import private_folder
from gradtrail.support.tables import duration
from gradtrail.tracking.stale_outs import warn_of_earlier_model, warn_of_other_files
from gradtrail.tracking.sync import sync


def reproduce(arguments: list[str]) -> int:
    """Run `dvc repro` with these arguments and return its exit status.

    If no source of the data set answers and it has a stand-in, switch to the stand-in, print that, and run again.
    """
    started = time.monotonic()
    _fit_dvc_to_git()
    validate_params()
    stamp = "" if arguments else pipeline_stamp()
    if is_up_to_date(stamp):
        print("Data and pipelines are up to date.")  # DVC's words
    elif status := run_dvc(arguments):
        return status
    else:
        remember(stamp)
    backfill()
    if all(argument.startswith("-") for argument in arguments):
        # Not after only some stages: results/metrics/ may belong to another state
        _summarize(time.monotonic() - started)
    warn_of_processor()
    warn_of_earlier_model(Path())
    warn_of_other_files(Path())
    remind_of_stand_in()
    return 0


def run_dvc(arguments: Sequence[str]) -> int:
    """Run `dvc repro`, again if it switched to the stand-in of a data set without a source; return its exit status."""
    with tempfile.TemporaryDirectory() as folder, _visible(arguments):
        flag = Path(folder) / "no-source"
        command = [sys.executable, "-m", "dvc", "repro", *arguments]
        env = {**os.environ, NO_SOURCE_FLAG: str(flag), "VIRTUAL_ENV": sys.prefix}  # stages use this interpreter
        status = subprocess.run(command, env=env, check=False).returncode
        if status != 0 and flag.exists():
            use_stand_in()
            status = subprocess.run(command, env=env, check=False).returncode
    return status


@contextlib.contextmanager
def _visible(targets: Sequence[str]) -> Iterator[None]:
    """Make the optional pipelines among the targets visible to DVC; those that then have a `dvc.lock` stay visible."""
    names = {target.partition(":")[0] for target in targets}
    pipelines = [Path(name) for name in FILES[2::2] if name in names]
    for pipeline in pipelines:
        pipeline.with_name(".dvcignore").write_text("!/dvc.yaml\n")
    try:
        yield
    finally:
        for pipeline in pipelines:
            if not pipeline.with_name("dvc.lock").exists():
                pipeline.with_name(".dvcignore").unlink(missing_ok=True)


def _fit_dvc_to_git() -> None:
    """Set DVC's `core.no_scm` if there is no git repository, and unset it if there is one.

    `dvc repro` needs it in an unpacked archive; after `git init` it would break `dvc exp run`.
    """
    config = Path(".dvc/config.local")
    is_set = config.is_file() and "no_scm" in config.read_text()
    has_git = bool(git("rev-parse", "--git-dir"))
    if has_git == is_set:
        change = ["--unset", "core.no_scm"] if has_git else ["core.no_scm", "true"]
        subprocess.run([sys.executable, "-m", "dvc", "config", "--quiet", "--local", *change], check=True)


def validate_params() -> None:
    """Refuse invalid params, and an environment that may change results, before DVC removes outputs of stages to run.

    Valid params are not validated again until they or the code change, as the config classes take seconds to import.
    """
    environment = load_section("environment", EnvironmentConfig)
    refuse_variables(environment)
    require_jax(environment.xla_flags)
    params = [file for file in map(Path, PARAMS_FILES) if file.is_file()]
    files = [*params, *sorted(NETWORKS.glob("*.*")), *sorted(Path(gradtrail.__file__ or "").parent.rglob("*.py"))]
    key = sha256_of({str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files})
    valid = private_folder() / "valid.txt"
    if valid.is_file() and valid.read_text() == key:
        return
    from gradtrail.experiments.param_classes import SECTIONS

    for file, section in [(path, section) for path in params for section in read_yaml(path)]:
        if section in SECTIONS and params_file(section) != file:
            raise UserError(f"{file}: the section {section!r} belongs in {params_file(section)}")
        if section in SECTIONS:
            load_section(section, SECTIONS[section])
        elif near := suggestion(str(section), SECTIONS):  # any other may belong to a stage of one's own
            raise UserError(f"{file}: no stage reads the section {str(section)!r}{near}")
    with atomic_file(valid) as temporary:
        temporary.write_text(key)


def backfill() -> None:
    """Add the runs of states that DVC skipped or restored; an error of the store is a warning."""
    if not load_section("runtime", RuntimeConfig).tracking:
        return
    try:
        with_store(sync)
    except UserError as error:
        print(f"warning: {error}; `gradtrail sync` tries again", file=sys.stderr)


def warn_of_processor() -> None:
    """Say that another processor made the committed results, where this one cannot make their bytes."""
    if has_common_bytes() or not git("status", "--porcelain", "dvc.lock"):
        return
    print(
        "this processor lacks AVX2 or FMA: its results differ from the committed ones in last digits, the accuracy by "
        "less than its interval; `git commit dvc.lock results/metrics` keeps them, `git checkout` of both undoes them",
        file=sys.stderr,
    )


def _summarize(seconds: float) -> None:
    """Print the accuracy, the time of the command, and the path of the report."""
    path = Path("results/metrics/evaluate.json")
    if path.is_file():
        metrics = json.loads(path.read_text(encoding="utf-8"))
        parts = [
            f"{name.replace('_', ' ')} {metrics[name]:.2%} "
            f"(95 % interval {metrics[f'{name}_low']:.2%} to {metrics[f'{name}_high']:.2%})"
            for name in ("accuracy", "balanced_accuracy")
            if name in metrics  # the second of unequal classes alone
        ]
        print(f"{metrics['dataset']}: test {', '.join(parts)}, in {duration(seconds)}")
        print("report: results/report.html; `make ui` compares the runs")


def use_stand_in() -> None:
    """Set `fetch.dataset` in `params.yaml` to the stand-in of the data set, and change no other character."""
    original = read_yaml(PARAMS)["fetch"]["dataset"]
    stand_in = DATASETS[original].stand_in
    text = PARAMS.read_text(encoding="utf-8")
    changed = re.sub(rf"(?ms)(^fetch:.*?^\s+dataset:\s*)(['\"]?){original}\b\2", rf"\g<1>{stand_in}", text, count=1)
    if changed == text:
        raise UserError(f"{PARAMS}: fetch.dataset could not be changed automatically; set it to {stand_in}")
    with atomic_file(PARAMS) as temporary:
        temporary.write_text(changed, encoding="utf-8")
    print(f"No source of {title(original)} answered; fetch.dataset in {PARAMS} is now {stand_in}.", file=sys.stderr)


def remind_of_stand_in() -> None:
    """Print a reminder if the data set is a stand-in for another."""
    stand_in = read_yaml(PARAMS)["fetch"]["dataset"]
    if original := stands_in_for(stand_in):
        text = (
            f"These are results on {title(stand_in)}, not on {title(original)}.\nTo use {title(original)}, set "
            f"fetch.dataset: {original} in {PARAMS} and run `make repro` with a network or "
            f"{DATASETS[original].folder_variable}."
        )
        Console(stderr=True).print(Panel(text, title=f"NOT {title(original)}", border_style="bold red"))
