"""The folders of a stage: the working folder, whose code and data it uses, and the root, which has the store.

Both are the repository, except under `dvc exp run --temp` and in a queue: there DVC runs the stage in a copy below
`.dvc/tmp/exps` and names the repository in `DVC_ROOT`.
"""

import os
import re
from pathlib import Path

import gradtrail
from gradtrail.support.errors import HIDDEN, UserError

# Files in a folder of checkpoints: its training is complete; key of the state that was made last with it
COMPLETE, USER = "complete", "user"
SQLITE = "sqlite:///"  # prefix of the URI of a store that is a file, not a server


def working_folder() -> Path:
    """The folder that holds the running code's `dvc.yaml`: deps, params and outputs are relative to it."""
    return Path.cwd()


def root() -> Path:
    """The repository: holds `mlflow.db`, `mlruns/` and `.gradtrail/`, whichever copy the stage runs in."""
    return Path(os.environ.get("DVC_ROOT") or working_folder()).resolve()


def is_copy() -> bool:
    """Whether the working folder is a copy, in which DVC runs an experiment with `--temp` or from its queue."""
    return working_folder().resolve() != root()


def same_command() -> str:
    """What a person runs to repeat a stage that stopped; in a copy, which is gone then, the experiment."""
    return "`dvc exp run` with the same options" if is_copy() else "`dvc repro`"


def private_folder() -> Path:
    """`.gradtrail/` in the root, created if needed: locks and caches. Git-ignored; may be deleted at any time."""
    folder = root() / ".gradtrail"
    folder.mkdir(exist_ok=True)
    return folder


def find_project(start: Path) -> Path:
    """Return the nearest folder at or above `start` that DVC manages; raise UserError if it is not this project."""
    project = next((folder for folder in (start, *start.parents) if (folder / ".dvc").is_dir()), None)
    if project and all((project / part).exists() for part in ("dvc.yaml", "src/gradtrail")):
        return project
    why = f"{project} is another DVC project" if project else "no folder here or above has .dvc/"
    raise UserError(f"{start}: not inside a gradtrail repository ({why})")


def store_uri() -> str:
    """The address of MLflow's store: that of `MLFLOW_TRACKING_URI`, or else the root's `mlflow.db`.

    A relative path of a database is relative to the root, not to the copy in which DVC may run a stage. Credentials are
    refused, as the address is written to runs, models and caches.
    """
    address = os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}mlflow.db"
    if re.fullmatch(f"{SQLITE}[^?]+", address):
        return f"{SQLITE}{root() / address.removeprefix(SQLITE)}"
    if re.fullmatch(r"https?://[^@\s]+", address):
        return address.rstrip("/")
    _, separator, host = address.rpartition("@")
    raise UserError(
        f"MLFLOW_TRACKING_URI: must be {SQLITE}FILE, or http://HOST:PORT or https://HOST of a tracking server "
        "without credentials, which belong in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; "
        f"got {HIDDEN + separator + host if separator else address!r}"
    )


def database_path(uri: str) -> Path:
    """The database file that the address of a store names."""
    return Path(uri.removeprefix(SQLITE))


def require_own_code() -> None:
    """Refuse to run a stage with a package from elsewhere than the working folder's `src`.

    An editable install names one folder; a queued experiment runs in another. Running the code of the first under the
    key of the second would record wrong results.
    """
    imported = Path(gradtrail.__file__ or "").resolve().parent
    expected = (working_folder() / "src" / "gradtrail").resolve()
    if imported != expected:
        raise UserError(
            f"gradtrail was imported from {imported}, not from {expected}: a stage runs from the repository's root, "
            "with the code of its own folder; put its src first on PYTHONPATH"
        )
