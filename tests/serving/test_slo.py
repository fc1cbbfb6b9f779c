import dataclasses
from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.serving.slo import Limits, read_slo
from gradtrail.support.errors import UserError

TEXT = (ROOT / "deploy/slo.yaml").read_text()


def test_the_projects_file_is_valid_and_judges_every_limit():
    found = read_slo(ROOT / "deploy/slo.yaml")
    assert all(value is not None for value in vars(found.limits).values())
    assert found.objectives.window_days == 30


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
def test_a_limit_may_be_null_but_not_missing(tmp_path: Path, name: str):
    lines = TEXT.splitlines()
    (index,) = (number for number, line in enumerate(lines) if line.startswith(f"  {name}:"))
    lines[index] = f"  {name}: null"
    assert getattr(read_slo(written(tmp_path, "\n".join(lines))).limits, name) is None
    del lines[index]
    with pytest.raises(UserError, match=f"limits.{name} is missing"):
        read_slo(written(tmp_path, "\n".join(lines)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("agreement: 0.96", "agreement: 1.5", "limits.agreement must be at least 0 and at most 1, got 1.5"),
        ("p99_ms_1: 10.0", "p99_ms_1: 0", "limits.p99_ms_1 must be above 0"),
        ("p99_ms_1: 10.0", "p98_ms_1: 10.0", "limits.p98_ms_1 is not a known key; did you mean 'p99_ms_1'?"),
        ("p99_ms_1: 10.0", "p99_ms_1: fast", "limits.p99_ms_1: Input should be a valid number, got 'fast'"),
        ("significance: 0.01", "significance: 0", "canary.significance must be above 0"),
        ("availability: 0.999", "availability: 1", "objectives.availability must be above 0 and below 1"),
        ("objectives:", "promises:", "section 'objectives' is missing"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path, old: str, new: str, said: str):
    assert old in TEXT
    with pytest.raises(UserError) as error:
        read_slo(written(tmp_path, TEXT.replace(old, new)))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "slo.yaml"
    path.write_text(text)
    return path
