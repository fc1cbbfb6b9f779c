"""Results in `benchmarks/results` name what they measured, and pages that quote old ones say so."""

import contextlib
import datetime
import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from factories import ROOT

from benchmarks import record
from gradtrail.support.git import CommandError, git
from gradtrail.tracking.environment import machine_key

LINK = re.compile(r"benchmarks/results/([\w.-]+\.json)")
LINKS = [(page, name) for page in sorted((ROOT / "docs").glob("*.md")) for name in LINK.findall(page.read_text())]
MAX_COMMITS = 150


@pytest.mark.parametrize(("page", "name"), LINKS, ids=lambda value: getattr(value, "stem", value))
def test_page_says_the_date_of_an_old_result(page: Path, name: str) -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    date = datetime.datetime.fromisoformat(content["date"])
    commit, count = content.get("commit", "").removesuffix("-dirty"), math.inf
    with contextlib.suppress(CommandError):  # a shallow clone
        count = float((commit and git("-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD")) or "inf")
    assert count <= MAX_COMMITS or f"{date.day} {date:%B %Y}" in page.read_text()


def test_every_result_is_quoted() -> None:
    files = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert files == {name for _, name in LINKS}


def test_result_names_commit_and_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(record, "FOLDER", tmp_path / "results")
    record.record("naming", {"seconds": 1.0})
    content: dict[str, Any] = json.loads((tmp_path / "results" / f"naming-{machine_key()}.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", content["commit"])
    assert content["environment"]["processor"]
    assert content["results"] == {"seconds": 1.0}


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_benchmark_uses_names_that_exist(path: Path) -> None:
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
