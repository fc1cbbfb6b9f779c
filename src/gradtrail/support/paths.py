"""Where a stage stands: the folder whose code and data it uses, and the root that holds the store.

Both are the repository, but under `dvc exp run --temp` and in a queue, where DVC runs the stage in a copy below
`.dvc/tmp/exps` and names the repository in `DVC_ROOT`.
"""

import os
from pathlib import Path

import gradtrail
from gradtrail.support.errors import UserError

SQLITE = "sqlite:///"  # how the address of a store begins that is a file here, and no server


def working_folder() -> Path:
    """The folder that holds the running code's `dvc.yaml`: deps, params and outs are relative to it."""
    return Path.cwd()


def root() -> Path:
    """The repository: holds `mlflow.db`, `mlruns/` and `.gradtrail/`, whichever copy the stage runs in."""
    return Path(os.environ.get("DVC_ROOT") or working_folder()).resolve()


def store_uri() -> str:
    """The address of MLflow's store: what `MLFLOW_TRACKING_URI` names, or else the root's `mlflow.db`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{root() / 'mlflow.db'}"


def database_path(uri: str) -> Path:
    """The database that the address of a store names, where it is a file here."""
    return Path(uri.removeprefix(SQLITE))


def private_folder() -> Path:
    """`.gradtrail/` in the root, made if need be: locks and caches. Git-ignored; may be deleted at any time."""
    folder = root() / ".gradtrail"
    folder.mkdir(exist_ok=True)
    return folder


def require_own_code() -> None:
    """Refuse to go on unless `gradtrail` was imported from the working folder's `src`.

    An editable install names one folder; a queued experiment runs in another. Code of the first under the name of
    the second would be wrong results with a right label.

    Raises:
        UserError: the working folder is not the repository's, or the package comes from elsewhere.
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
