"""The folders of a stage: the working folder, whose code and data it uses, and the root, which has the store.

Both are the repository, except under `dvc exp run --temp` and in a queue: there DVC runs the stage in a copy below
`.dvc/tmp/exps` and names the repository in `DVC_ROOT`.
"""

import os
import re
import sys
from pathlib import Path

import gradtrail
from gradtrail.support.errors import UserError
from gradtrail.support.secrets import HIDDEN

# Files in a folder of checkpoints: its training is complete; key of the state that was made last with it
COMPLETE, USER = "complete", "user"
SQLITE = "sqlite:///"  # prefix of the URI of a store that is a file, not a server


def working_folder() -> Path:
    """The folder that holds the running code's `dvc.yaml`: deps, params and outputs are relative to it."""
    return Path.cwd()


def find_project(start: Path) -> Path:
    """Return the project's folder: the nearest one above `start`, or itself, that DVC manages, as `dvc` finds it.

    Raises:
        UserError: There is none, or it holds another project; or `DVC_ROOT` names another folder.
    """
    project = next((folder for folder in (start, *start.parents) if (folder / ".dvc").is_dir()), None)
    if project is None or not _is_project(project):
        why = f"{project} is another DVC project" if project else "no folder here or above has .dvc/"
        raise UserError(f"{start}: not inside a gradtrail repository ({why})")
    if not _is_project(root()) and "DVC_ROOT" in os.environ:
        raise UserError(f"DVC_ROOT: must name a gradtrail repository, got {os.environ['DVC_ROOT']!r}; unset it")
    return project


def _is_project(folder: Path) -> bool:
    return all((folder / part).exists() for part in (".dvc", "dvc.yaml", "src/gradtrail"))


def root() -> Path:
    """The repository: holds `mlflow.db`, `mlruns/` and `.gradtrail/`, whichever copy the stage runs in."""
    return Path(os.environ.get("DVC_ROOT") or working_folder()).resolve()


def store_uri() -> str:
    """The address of MLflow's store: that of `MLFLOW_TRACKING_URI`, or else the root's `mlflow.db`.

    A relative path of a database is relative to the root, not to the copy in which DVC may run a stage.

    Raises:
        UserError: The address has another form, or contains credentials, although it is written to runs, models and
            caches. Or Python cannot read the name of the root.
    """
    if sys.getfilesystemencoding() != "utf-8" and not str(root()).isascii():  # MLflow decodes names as UTF-8
        raise UserError(f"PYTHONUTF8: must not be 0 with this locale, as the name of {root()} is not ASCII; unset it")
    address = os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}mlflow.db"
    if re.fullmatch(f"{SQLITE}[^?]+", address):
        return f"{SQLITE}{root() / address.removeprefix(SQLITE)}"
    if not re.fullmatch(r"https?://[^@\s]+", address):
        _, separator, host = address.rpartition("@")
        raise UserError(
            f"MLFLOW_TRACKING_URI: must be {SQLITE}FILE, or http://HOST:PORT or https://HOST of a tracking server "
            "without credentials, which belong in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; "
            f"got {HIDDEN + separator + host if separator else address!r}"
        )
    return address.rstrip("/")


def database_path(uri: str) -> Path:
    """The database file that the address of a store names."""
    return Path(uri.removeprefix(SQLITE))


def private_folder() -> Path:
    """`.gradtrail/` in the root, created if needed: locks and caches. Git-ignored; may be deleted at any time."""
    folder = root() / ".gradtrail"
    folder.mkdir(exist_ok=True)
    return folder


def require_own_code() -> None:
    """Refuse to go on unless `gradtrail` was imported from the working folder's `src`.

    An editable install names one folder; a queued experiment runs in another. Running the code of the first under the
    key of the second would record wrong results.

    Raises:
        UserError: The working folder is not the root of a repository, or the package was imported from elsewhere.
    """
    if not Path("dvc.yaml").is_file():
        raise UserError(f"{Path.cwd()}: no dvc.yaml here; run a stage from the repository's root")
    imported = Path(gradtrail.__file__ or "").resolve().parent
    expected = (working_folder() / "src" / "gradtrail").resolve()
    if imported != expected:
        raise UserError(
            f"gradtrail was imported from {imported}, not from {expected}: "
            "a stage runs the code of its own folder; put its src first on PYTHONPATH"
        )
