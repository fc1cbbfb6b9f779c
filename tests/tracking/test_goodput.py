"""Goodput, lost seconds and price of a training on its run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradtrail.support.goodput import Attempt
from gradtrail.tracking.goodput import add_goodput

KILLED = Attempt(began=0.0, seconds={"imports": 1.0, "steps": 4.0}, networks={"0": [(0, 0.0), (8, 4.0)]})
LAST = Attempt(began=15.0, seconds={"imports": 1.0, "steps": 4.0}, networks={"0": [(6, 0.0), (14, 4.0)]})


@pytest.mark.parametrize("price", [None, 360.0])
def test_metrics_are_of_all_attempts(price: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points: dict[str, Any] = {}
    record: Any = SimpleNamespace(artifacts=tmp_path, add_points=points.update)
    add_goodput(record, [KILLED, LAST], "mlp", price)
    found = {name: values[None] for name, values in points.items()}
    cost = {"train/cost": pytest.approx(1.0)} if price else {}  # 10 s; nobody pays for the 10 s between the attempts
    seconds = {"train/seconds_wasted_progress": pytest.approx(1.0), "train/seconds_idle": pytest.approx(10.0)}
    assert found == {"train/goodput": pytest.approx(7 / 20), **seconds, **cost}
    assert capsys.readouterr().err == "train: goodput 35% of 20.0 s, attempts: 2\n"
    assert (tmp_path / "goodput.png").is_file()


def test_a_script_without_steps_has_no_goodput(tmp_path: Path) -> None:
    record: Any = SimpleNamespace(artifacts=tmp_path)
    add_goodput(record, [Attempt(began=0.0, seconds={"imports": 1.0})], "toy", 1.0)
    assert not [*tmp_path.iterdir()]
