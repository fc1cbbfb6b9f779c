"""A stage ends with one line: its metrics and its time."""

import json
import re
import shutil
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.stages.common.stage import Stage, run_stage


def test_stage_ends_with_its_metrics_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pipeline").mkdir()
    for name in ("dvc.yaml", "pipeline/versions.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)

    def main(stage: Stage) -> None:
        (stage.folder / "results" / "metrics").mkdir(parents=True)
        metrics = {"dataset": "digits", "num_examples": 12_345, "test_loss": 0.123456}
        (stage.folder / "results" / "metrics" / "fetch.json").write_text(json.dumps(metrics))

    run_stage(main, "fetch", shows=("num_examples", "test_loss"))
    run_stage(lambda _: None, "fetch")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"fetch: examples 12,345, test loss 0\.1235, [\d.]+ s", first)
    assert re.fullmatch(r"fetch: [\d.]+ s", second)
