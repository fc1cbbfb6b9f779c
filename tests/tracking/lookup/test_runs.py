"""Which run wrote a file: of those with its bytes the one that wrote them here, and of these the one in `dvc.lock`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradtrail.stages.common.digests import digest
from gradtrail.support.errors import UserError
from gradtrail.tracking.lookup import runs as lookup

LOCK = "state-of-the-lock"


def run(name: str, state: str, outs: dict[str, str]) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(run_id=name),
        data=SimpleNamespace(tags={"state": state, "outs": json.dumps(outs)}),
    )


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`models/final.safetensors` of a repository whose lock has one state."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "models").mkdir()
    path = tmp_path / "models/final.safetensors"
    path.write_text("weights")
    monkeypatch.setattr(lookup, "working_snapshot", lambda: "a lock")
    monkeypatch.setattr(lookup, "consistent_stages", lambda _: [SimpleNamespace(state=LOCK)])
    return path


def keep(folder: Path, files: dict[str, str]) -> str:
    """Put the listing of a folder into the cache; return its digest."""
    md5 = "12" * 16 + ".dir"
    path = folder / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([{"relpath": name, "md5": item} for name, item in files.items()]))
    return md5


def test_bytes_that_a_run_wrote_to_several_paths_were_written_to_each(weights: Path, tmp_path: Path) -> None:
    md5 = digest(weights)
    epochs = keep(tmp_path, {"002.safetensors": md5})
    outs = {"models/epochs": epochs, "models/final.safetensors": md5}
    both = [run("newer", "another", outs), run("older", LOCK, outs)]
    assert [item.info.run_id for item in lookup.writers(weights, both)] == ["older"]
    assert [item.info.run_id for item in lookup.writers(weights, both[:1])] == ["newer"]


def test_runs_that_wrote_the_bytes_to_another_path_count_if_none_wrote_this_path(weights: Path, tmp_path: Path) -> None:
    epochs = keep(tmp_path, {"002.safetensors": digest(weights)})
    elsewhere = [run("one", "another", {"models/epochs": epochs})]
    in_place = run("two", "a third", {"models/final.safetensors": digest(weights)})
    assert [item.info.run_id for item in lookup.writers(weights, elsewhere)] == ["one"]
    assert [item.info.run_id for item in lookup.writers(weights, [*elsewhere, in_place])] == ["two"]


def test_bytes_of_no_run_are_an_error_of_one_line(weights: Path) -> None:
    with pytest.raises(UserError, match="no run wrote these bytes"):
        lookup.writers(weights, [run("one", LOCK, {"models/final.safetensors": "0" * 32})])
