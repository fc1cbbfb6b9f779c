"""A bar shows on stderr when told to or when that is a terminal, and never elsewhere."""

import pytest

from gradtrail.support.progress import Unit, progress_bar


def test_nothing_is_shown_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar("train", 3, unit="steps") as bar:
        bar.advance(message="epoch 1/3")
        bar.update(3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("unit", "count"), [("steps", "3/10"), ("bytes", "3/10 bytes")])
def test_a_bar_shows_count_and_last_message_as_they_are(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unit: Unit, count: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with progress_bar("[train]", 10, unit=unit, enabled=True) as bar:
        bar.update(2, message="epoch [1/3] loss 0.05")
        bar.advance()
    out, err = capfd.readouterr()
    assert out == ""
    assert count in err
    assert "[train]" in err
    assert "epoch [1/3] loss 0.05" in err
