"""Whether this process is one of several that run a stage together, by its environment."""

import os
from pathlib import Path

from gradtrail.support.errors import UserError
from gradtrail.support.paths import private_folder

LAUNCH = "GRADTRAIL_LAUNCH"  # command that starts the processes of a stage; `pipeline/stage.sh` puts it first
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_INDICES = (INDEX, "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def is_launched() -> bool:
    """Whether the environment names other processes, or the command that starts them."""
    return any(os.environ.get(name) for name in (LAUNCH, ADDRESS, COUNT, INDEX))


def is_follower() -> bool:
    """Whether this is a process after the first, which leaves files, runs and messages to process 0."""
    return is_launched() and process_index() != "0"


def process_index() -> str:
    """Return the index of this process, from the variables of its launcher; "0" without any."""
    return next((os.environ[name] for name in _INDICES if os.environ.get(name)), "0")


def log_path(index: str | None = None) -> Path:
    """Return the path of the log of a process, by default of this one."""
    folder = private_folder() / "processes"
    folder.mkdir(exist_ok=True)
    return folder / f"{index or process_index()}.log"


def refuse_followers(stage: str) -> None:
    """End all processes but one of a stage that runs in one process; process 0 raises UserError."""
    if is_follower():
        raise SystemExit(2)
    if int(os.environ.get(COUNT) or 1) > 1:
        raise UserError(f"{COUNT} is {os.environ[COUNT]}, but stage {stage} runs in one process")
