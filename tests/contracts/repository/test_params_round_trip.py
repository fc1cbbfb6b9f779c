"""The params files: each key has a comment, and `dvc exp run -S` changes values, but no comment or order of keys."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.cli_parse import to_path_overrides
from dvc.utils.hydra import apply_overrides

from gradtrail.stages.common.params import PARAMS, flatten
from gradtrail.stages.common.pipeline_file import PARAMS_FILES
from gradtrail.stages.common.yaml_file import read_yaml

ROOT = Path(__file__).parents[3]
each_file = pytest.mark.parametrize("name", PARAMS_FILES)


@each_file
def test_overrides_of_all_keys_keep_all_comments_and_blank_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {key: [77] if isinstance(value, list) else 77 for key, value in flatten(read_yaml(ROOT / name)).items()}
    lines = _overridden(name, values)
    assert flatten(read_yaml(Path(name))) == values
    assert _without_values(lines) == _without_values(_lines(ROOT / name))


@each_file
def test_override_of_one_key_changes_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (key, *_) = (key for key, value in flatten(read_yaml(ROOT / name)).items() if type(value) is int)
    pairs = zip(_lines(ROOT / name), _overridden(name, {key: 77}), strict=True)
    ((before, after),) = ((before, after) for before, after in pairs if before != after)
    assert after.split() == re.sub(r": \d+", ": 77", before).split()


@each_file
def test_every_key_has_a_comment_on_its_line_or_above(name: str) -> None:
    lines = _lines(ROOT / name)
    keys = [(above, line) for above, line in itertools.pairwise(lines) if re.match(r" +\w+:", line)]
    assert [line for above, line in keys if "  # " not in line and not above.strip().startswith("#")] == []
    assert len(lines) <= 240
    assert "".join(lines).isascii()


def _overridden(name: str, values: dict[str, Any]) -> list[str]:
    """Return the lines of a copy of a params file in which `-S` has set values."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, path)
    options = [f"{'' if path == PARAMS else f'{name}:'}{key}={value}" for key, value in values.items()]
    for file, overrides in to_path_overrides(options).items():
        apply_overrides(Path(file), overrides)
    return _lines(path)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _without_values(lines: list[str]) -> list[str]:
    """Return the lines of a file of params without list items and values."""
    keys = (line for line in lines if not line.strip().startswith("- "))
    return [re.sub(r"^( *\w+:)[^#]*(#|$)", r"\1\2", line) for line in keys]
