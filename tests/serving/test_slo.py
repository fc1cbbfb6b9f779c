from pathlib import Path

import pytest
from factories import ROOT

from gradtrail.serving.slo import read_slo
from gradtrail.support.errors import UserError

TEXT = (ROOT / "deploy/slo.yaml").read_text()


def test_committed_file_is_valid_and_judges_every_limit():
    limits = read_slo(ROOT / "deploy/slo.yaml").limits
    assert None not in vars(limits).values()


def test_limit_may_be_null_but_not_missing(tmp_path: Path):
    null = written(tmp_path, TEXT.replace("  agreement: 0.96", "  agreement: null"))
    assert read_slo(null).limits.agreement is None
    with pytest.raises(UserError, match=r"limits.agreement is missing"):
        read_slo(written(tmp_path, TEXT.replace("  agreement: 0.96\n", "")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("agreement: 0.96", "agreement: 1.5", "limits.agreement must be at least 0 and at most 1, got 1.5"),
        ("p99_ms_1: 10.0", "p99_ms_1: 0", "limits.p99_ms_1 must be above 0"),
        ("p99_ms_1: 10.0", "p98_ms_1: 10.0", "limits.p98_ms_1 is not a known key; did you mean 'p99_ms_1'?"),
        ("p99_ms_1: 10.0", "p99_ms_1: fast", "limits.p99_ms_1: Input should be a valid number, got 'fast'"),
        ("significance: 0.01", "significance: 0", "canary.significance must be above 0"),
        ("canary:", "canaries:", "section 'canary' is missing"),
    ],
)
def test_mistake_is_one_line_that_names_the_key(tmp_path: Path, old: str, new: str, message: str):
    assert old in TEXT
    with pytest.raises(UserError) as error:
        read_slo(written(tmp_path, TEXT.replace(old, new)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "slo.yaml"
    path.write_text(text)
    return path
