"""A bar is drawn on stderr only where that is a terminal or on request; lines are always written."""

import pytest

from gradtrail.support.progress import Unit, progress_bar


def test_without_a_terminal_there_are_only_lines(capfd: pytest.CaptureFixture[str]) -> None:
    line = f"[rates] {'low, seed 0 ' * 20}: done"  # longer than a console, with brackets that are no markup
    with progress_bar("train", 3, unit="steps") as bar:
        bar.advance(message="epoch 1/3")
        bar.print(line)
        bar.update(3)
    assert capfd.readouterr() == ("", f"{line}\n")


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
    assert all(text in err for text in (count, "[train]", "epoch [1/3] loss 0.05"))
