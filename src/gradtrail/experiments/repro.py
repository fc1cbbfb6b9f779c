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
from typing import Any

from rich.console import Console
from rich.panel import Panel

import gradtrail
from gradtrail.experiments.sections import require_known_sections, section_configs
from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, refuse_variables, require_jax
from gradtrail.stages.common.files import atomic_file, digest
from gradtrail.stages.common.params import load_section, read_yaml
from gradtrail.stages.common.pipeline_file import FILES, sha256_of
from gradtrail.stages.datasets import DATASETS, stands_in_for, title
from gradtrail.support.errors import NO_SOURCE_FLAG, UserError, with_store
from gradtrail.support.git import git
from gradtrail.support.paths import private_folder
from gradtrail.tracking.sync import sync

_PARAMS = Path("params.yaml")


def reproduce(arguments: list[str]) -> int:
    """Run `dvc repro`. If no source answers and the data set has a stand-in, switch to it, print that, and run again.

    Args:
        arguments: Arguments for `dvc repro`.

    Returns:
        The exit status of `dvc repro`.
    """
    started = time.monotonic()
    fit_dvc_to_git()
    _validate_params()
    with tempfile.TemporaryDirectory() as folder, _visible(arguments):
        flag = Path(folder) / "no-source"
        status = _dvc_repro(arguments, flag)
        if status != 0 and flag.exists():
            _use_stand_in()
            status = _dvc_repro(arguments, flag)
    if status != 0:
        return status
    _backfill()
    if all(argument.startswith("-") for argument in arguments):
        # Not after only some stages: results/metrics/ may belong to another state
        _summarize(time.monotonic() - started)
    _remind_of_stand_in()
    return 0


@contextlib.contextmanager
def _visible(targets: Sequence[str]) -> Iterator[None]:
    """Make the optional pipelines among the targets visible to DVC; those that then have a `dvc.lock` stay visible."""
    pipelines = [
        Path(name) for name in FILES[2::2] if Path(name) in {Path(target.partition(":")[0]) for target in targets}
    ]
    for pipeline in pipelines:
        pipeline.with_name(".dvcignore").write_text("!/dvc.yaml\n")
    try:
        yield
    finally:
        for pipeline in pipelines:
            if not pipeline.with_name("dvc.lock").exists():
                pipeline.with_name(".dvcignore").unlink(missing_ok=True)


def fit_dvc_to_git() -> None:
    """Set DVC's `core.no_scm` if there is no git repository, and unset it if there is one.

    `dvc repro` needs it in an unpacked archive; after `git init` it would break `dvc exp run`.
    """
    config = Path(".dvc/config.local")
    set_by_us = config.is_file() and b"no_scm" in config.read_bytes()
    has_git = bool(git("rev-parse", "--git-dir"))
    if has_git == set_by_us:
        unset = ["--unset"] if has_git else []
        value = [] if has_git else ["true"]
        command = [sys.executable, "-m", "dvc", "config", "--quiet", "--local", *unset, "core.no_scm", *value]
        subprocess.run(command, check=True)


def _validate_params() -> None:
    """Refuse invalid params, and an environment that may change results, before DVC removes outputs of stages to run.

    Valid params are not validated again until they or the code change.
    """
    params = read_yaml(_PARAMS)
    config = load_section("environment", EnvironmentConfig) if "environment" in params else None
    refuse_variables(config)
    require_jax(config.xla_flags if config else ())
    valid, key = private_folder() / "valid.txt", _params_key()
    if not (valid.is_file() and valid.read_bytes() == key.encode()):
        require_known_sections()
        for section, into in section_configs().items():
            load_section(section, into)
        with atomic_file(valid) as temporary:
            temporary.write_text(key)


def _params_key() -> str:
    """Return a digest of the params, the pipeline, and the times and sizes of the source files."""
    code = Path(gradtrail.__file__ or "").parent
    stats = [(str(path), path.stat()) for path in sorted(code.rglob("*.py"))]
    described = [
        *(digest(path) for path in (_PARAMS, Path("dvc.yaml"))),
        *((name, s.st_size, s.st_mtime_ns) for name, s in stats),
    ]
    return sha256_of({"key": described})


def _dvc_repro(arguments: list[str], flag: Path) -> int:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    env = {**os.environ, NO_SOURCE_FLAG: str(flag), "VIRTUAL_ENV": sys.prefix}  # stages use this interpreter
    return subprocess.run(command, env=env, check=False).returncode


def _backfill() -> None:
    """Add the runs of states that DVC skipped or restored; an error of the store is a warning."""
    if not load_section("runtime", RuntimeConfig).tracking:
        return
    try:
        with_store(sync)
    except UserError as error:
        print(f"warning: {error}; `gradtrail sync` tries again", file=sys.stderr)


def _summarize(seconds: float) -> None:
    """Print the accuracy, the time of the command, and the path of the report."""
    path, report = Path("results/metrics/evaluate.json"), Path("results/report.html")
    if path.is_file():
        metrics = json.loads(path.read_text(encoding="utf-8"))
        interval = f"95 % interval {metrics['accuracy_low']:.2%} to {metrics['accuracy_high']:.2%}"
        print(f"{metrics['dataset']}: test accuracy {metrics['accuracy']:.2%} ({interval}), in {_duration(seconds)}")
        print(f"report: {report}; `make ui` compares the runs" if report.is_file() else "`make ui` compares the runs")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _use_stand_in() -> None:
    """Set `fetch.dataset` in `params.yaml` to the stand-in of the data set, and change no other character."""
    original = _dataset(read_yaml(_PARAMS))
    stand_in = DATASETS[original].stand_in
    text = _PARAMS.read_text(encoding="utf-8")
    changed = re.sub(rf"(?ms)(^fetch:.*?^\s+dataset:\s*)(['\"]?){original}\b\2", rf"\g<1>{stand_in}", text, count=1)
    with atomic_file(_PARAMS) as temporary:
        temporary.write_text(changed, encoding="utf-8")
    if _dataset(read_yaml(_PARAMS)) != stand_in:
        raise UserError(f"{_PARAMS}: fetch.dataset could not be changed automatically; set it to {stand_in}")
    _banner(
        f"No source of {title(original)} answered. Continuing with {title(stand_in)}.\n"
        f"fetch.dataset in params.yaml is now {stand_in}; every metrics file, run and figure names it.",
        title(original),
    )


def _remind_of_stand_in() -> None:
    """Print a reminder if the data set is a stand-in for another."""
    stand_in = _dataset(read_yaml(_PARAMS))
    if original := stands_in_for(stand_in):
        name, variable = title(original), DATASETS[original].folder_variable
        _banner(
            f"These are results on {title(stand_in)}, not on {name}.\nTo use {name}, set fetch.dataset: {original} in "
            f"params.yaml and run `make repro` with a network or {variable}.",
            name,
        )


def _banner(text: str, original: str) -> None:
    Console(stderr=True).print(Panel(text, title=f"NOT {original}", border_style="bold red"))


def _dataset(params: dict[str, Any]) -> Any:
    try:
        return params["fetch"]["dataset"]
    except (KeyError, TypeError):
        raise UserError(f"{_PARAMS}: fetch.dataset is missing") from None
