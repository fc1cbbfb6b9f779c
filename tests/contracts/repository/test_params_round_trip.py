"""`dvc exp run -S` changes values of `params.yaml`, and no comment, blank line or order of keys."""

import re
import shutil
from pathlib import Path

from dvc.utils.hydra import apply_overrides

from gradtrail.stages.common.params import PARAMS, flatten
from gradtrail.stages.common.yaml_file import read_yaml

ROOT = Path(__file__).parents[3]


def test_overrides_of_all_keys_keep_all_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / PARAMS
    shutil.copyfile(ROOT / PARAMS, path)
    values = {key: [77] if isinstance(value, list) else 77 for key, value in flatten(read_yaml(path)).items()}
    apply_overrides(path, [f"{key}={value}" for key, value in values.items()])
    assert flatten(read_yaml(path)) == values
    assert _without_values(path) == _without_values(ROOT / PARAMS)


def _without_values(path: Path) -> list[str]:
    """Return the lines of a file of params without list items and values."""
    lines = (line for line in path.read_text().splitlines() if not line.strip().startswith("- "))
    return [re.sub(r"^( *\w+:)[^#]*(#|$)", r"\1\2", line) for line in lines]
