"""`make repro`: `dvc repro`, from a clone or an unpacked archive, with or without a network."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel

from gradtrail.core.data.preprocessing import PreprocessConfig
from gradtrail.core.evaluate.metrics import EvaluateConfig
from gradtrail.core.gradients.config import GradientsConfig
from gradtrail.core.profile.variants import ProfileConfig
from gradtrail.core.train.config import TrainConfig
from gradtrail.stages.common.files import atomic_file
from gradtrail.stages.common.params import load_section, read_yaml
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.fetch.sources import NO_SOURCE_FLAG, FetchConfig
from gradtrail.stages.report.page import ReportConfig
from gradtrail.support.errors import UserError, with_store
from gradtrail.support.git import git
from gradtrail.tracking.sync.sync import sync

SECTIONS: dict[str, type] = {
    "fetch": FetchConfig,
    "preprocess": PreprocessConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "gradients": GradientsConfig,
    "profile": ProfileConfig,
    "report": ReportConfig,
    "runtime": RuntimeConfig,
}
_PARAMS = Path("params.yaml")


def reproduce(arguments: list[str]) -> int:
    """Run `dvc repro`; where no source of MNIST answers, set the digits in `params.yaml`, say so, and go on.

    Args:
        arguments: passed on to `dvc repro`.

    Returns:
        The exit status of `dvc repro`.
    """
    fit_dvc_to_git()
    _validate_params()
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder) / "no-source"
        status = _dvc_repro(arguments, flag)
        if status != 0 and flag.exists():
            _fall_back_to_digits()
            status = _dvc_repro(arguments, flag)
    if status == 0:
        _catch_up()
    if status == 0 and all(argument.startswith("-") for argument in arguments):
        _summarize()  # not after a run of some stages: the evaluation in the folder may be of another state
    if _dataset(read_yaml(_PARAMS)) == "digits":
        _remind_of_digits()
    return status


def fit_dvc_to_git() -> None:
    """Let DVC work without git while there is no git, and with it from the moment that there is.

    `core.no_scm` makes `dvc repro` possible in an unpacked archive, but would break `dvc exp run` once `git init`
    follows.
    """
    config = Path(".dvc/config.local")
    set_by_us = config.is_file() and "no_scm" in config.read_text(encoding="utf-8")
    has_git = bool(git("rev-parse", "--git-dir"))
    if has_git == set_by_us:
        unset = ["--unset"] if has_git else []
        value = [] if has_git else ["true"]
        command = [sys.executable, "-m", "dvc", "config", "--quiet", "--local", *unset, "core.no_scm", *value]
        subprocess.run(command, check=True)


def _validate_params() -> None:
    """Refuse params that any stage would refuse, before DVC removes the outs of the stages that it is to run."""
    for section, into in SECTIONS.items():
        load_section(section, into)


def _dvc_repro(arguments: list[str], flag: Path) -> int:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    env = {**os.environ, NO_SOURCE_FLAG: str(flag), "VIRTUAL_ENV": sys.prefix}  # stages use this interpreter
    return subprocess.run(command, env=env, check=False).returncode


def _catch_up() -> None:
    """Backfill the runs of states that DVC skipped or restored; a fault of the store is a warning."""
    if not load_section("runtime", RuntimeConfig).tracking:
        return
    try:
        with_store(sync)
    except UserError as error:
        print(f"warning: {error}; `gradtrail sync` tries again", file=sys.stderr)


def _summarize() -> None:
    """Say in one line what came out."""
    path = Path("metrics/evaluate.json")
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        interval = f"{found['accuracy_low']:.2%} to {found['accuracy_high']:.2%}"
        print(f"{found['dataset']}: test accuracy {found['accuracy']:.2%} ({interval}). `make ui` compares the runs.")


def _fall_back_to_digits() -> None:
    """Set `fetch.dataset: digits` in `params.yaml`, leaving every other character as it is."""
    text = _PARAMS.read_text(encoding="utf-8")
    changed = re.sub(r"(?ms)(^fetch:.*?^\s+dataset:\s*)(['\"]?)mnist\b\2", r"\1digits", text, count=1)
    with atomic_file(_PARAMS) as beside:
        beside.write_text(changed, encoding="utf-8")
    if _dataset(read_yaml(_PARAMS)) != "digits":
        raise UserError(f"{_PARAMS}: set fetch.dataset: digits by hand; this file is written in an unusual way")
    _banner(
        "No source of MNIST answered, so this goes on with DIGITS: 1,797 real digits that scikit-learn ships.\n"
        "fetch.dataset is now digits in params.yaml; every metrics file, run and figure says so."
    )


def _remind_of_digits() -> None:
    _banner(
        "These results are of the DIGITS data set, not of MNIST.\n"
        "To go back: set fetch.dataset: mnist in params.yaml, with a network or with MNIST_DIR set, and `make repro`."
    )


def _banner(text: str) -> None:
    Console(stderr=True).print(Panel(text, title="NOT MNIST", border_style="bold red"))


def _dataset(params: dict[str, Any]) -> Any:
    try:
        return params["fetch"]["dataset"]
    except (KeyError, TypeError):
        raise UserError(f"{_PARAMS}: fetch.dataset is missing") from None
