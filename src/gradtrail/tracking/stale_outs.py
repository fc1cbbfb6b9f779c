"""Outputs that are still of an earlier model or of other image files, because their stages did not run since."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from gradtrail.stages.common.files import digest, read_json
from gradtrail.stages.common.params import PARAMS, validate
from gradtrail.stages.common.pipeline_file import locked_entry, read_locks
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.data.data_files import FILES
from gradtrail.stages.datasets import DATASETS
from gradtrail.support.errors import UserError

_OUTS = {"export": "models/export", "gradients": "results/gradients", "report": "results/report.html"}
_MODEL = ("models/best.", "models/final.", "models/members", "results/evaluate")


def warn_of_earlier_model(folder: Path, stages: Iterable[str] = _OUTS) -> None:
    """Print a line if outputs of these stages are of other weights or another evaluation than those in `folder`."""
    locks, outs = read_locks(folder), []
    for stage in stages:
        read = locked_entry(locks[stage]).data if stage in locks else {}
        current = {path: digest(folder / path) for path in read if path.startswith(_MODEL) and (folder / path).exists()}
        if any(read[path] != md5 for path, md5 in current.items()) and (folder / _OUTS[stage]).exists():
            outs.append(_OUTS[stage])
    if outs:
        print(f"An earlier model made {', '.join(outs)}; `dvc repro` makes them again.", flush=True)


def warn_of_other_files(folder: Path) -> None:
    """Print a line if the paths, classes, splits or sizes of image files are not those that `fetch` read."""
    from gradtrail.stages.image_files import SOURCES, PicturesConfig, file_table  # late: a server has no `rich`

    table, fetch = folder / "data/raw" / FILES, read_yaml(folder / PARAMS)["fetch"]
    variable, list_files = DATASETS[fetch["dataset"]].folder_variable, SOURCES.get(fetch["dataset"])
    if not (list_files and table.exists() and variable in os.environ):
        return
    source, listed = Path(os.environ[variable]), dict[str, object]()
    with contextlib.suppress(UserError, ValueError):  # no such folder, or no image
        listed |= file_table(source, list_files(source), validate(fetch["pictures"], PicturesConfig, "fetch.pictures"))
    if listed != read_json(table):
        print(f"warning: {variable}={source} has other files than fetch read; --force reads them", flush=True)
