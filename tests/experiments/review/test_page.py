"""The page in a real browser: by keyboard alone, by finger on a small screen, in the dark, and when the server goes."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser, needs_chromium
from reviewing import new_review
from werkzeug.serving import make_server

from gradtrail.experiments.review import server
from gradtrail.experiments.review.session import Review
from gradtrail.stages.preprocess.corrections import Correction, read_corrections
from gradtrail.support.errors import UserError

pytestmark = [needs_chromium, pytest.mark.slow]
DESK = (1440, 900)
PHONE = (390, 844)


@contextlib.contextmanager
def page(review: Review, *, phone: bool = False, dark: bool = False) -> Iterator[Browser]:
    """Serve a review and open its page; wait for the first image."""
    with served(review) as address, opened(address, phone=phone, dark=dark) as page:
        yield page


@contextlib.contextmanager
def opened(address: str, *, phone: bool = False, dark: bool = False) -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile") as page:
        page.size(*(PHONE if phone else DESK), touch=phone)
        page.media(scheme="dark" if dark else "light")
        page.open(address)
        ready(page)
        yield page


@contextlib.contextmanager
def served(review: Review) -> Iterator[str]:
    with server.open_port(0) as listening:
        app, quiet = server.make_app(review, "secret"), server.Quiet
        running = make_server(server.HOST, 0, app, threaded=True, request_handler=quiet, fd=listening.fileno())
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://{server.HOST}:{listening.getsockname()[1]}/?token=secret"
        finally:
            running.shutdown()
            thread.join()


def ready(tab: Browser) -> None:
    tab.wait("document.getElementById('near').children.length > 0")
    idle(tab)


def idle(tab: Browser) -> None:
    """Wait until the page has done all that was asked of it."""
    tab.run("new Promise(done => { queue = queue.then(() => done(true)); })")


def text(tab: Browser, name: str) -> str:
    return tab.run(f"document.getElementById('{name}').innerText")


def decisions(folder: Path) -> dict[tuple[bool, int], Correction]:
    return {row.example: row for row in read_corrections(folder / "corrections.csv")}


def test_keys_typed_faster_than_the_page_responds_are_all_applied(tmp_path: Path) -> None:
    review = new_review(tmp_path)
    labels = [suspect.label for suspect in review.suspects]
    wrong = [(label + 1) % 3 for label in labels]
    with page(review) as tab:
        assert text(tab, "place") == "1 of 8"
        tab.press(str(wrong[0]), " ", "u", str(labels[3]))
        tab.press("ArrowLeft", "ArrowLeft", str(wrong[2]))  # another mind about the third
        idle(tab)
        assert text(tab, "decided") == "4 of 8"
        assert text(tab, "corrected") == "2"
        rows = [decisions(tmp_path).get(suspect.example) for suspect in review.suspects]
        assert [row.new if row else "open" for row in rows] == [
            wrong[0],
            labels[1],
            wrong[2],
            labels[3],
            *["open"] * 4,
        ]
        tab.press("z", "Backspace")
        idle(tab)
        assert text(tab, "place") == "4 of 8"
        rows = [decisions(tmp_path).get(suspect.example) for suspect in review.suspects]
        assert [row.new if row else "open" for row in rows] == [wrong[0], labels[1], None, *["open"] * 5]
        assert tab.errors == []


def test_note_is_saved_with_the_next_decision(tmp_path: Path) -> None:
    review = new_review(tmp_path)
    with page(review) as tab:
        tab.press("n")
        idle(tab)
        tab.press(*"u 0z", "Enter", "u")
        idle(tab)
        (row,) = decisions(tmp_path).values()
        assert (row.new, row.reason) == (None, "u 0z")
        tab.press("n")
        idle(tab)
        tab.press("=", "Enter", "u")
        idle(tab)
        assert "begins with '='" in text(tab, "fault")
        assert len(decisions(tmp_path)) == 1


def test_phone_without_a_keyboard_can_review(tmp_path: Path) -> None:
    review = new_review(tmp_path, num_classes=10)
    with page(review, phone=True) as tab:
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert tab.run("document.documentElement.scrollHeight <= innerHeight")
        sizes = tab.run("[...document.querySelectorAll('button')].map(b => b.getBoundingClientRect().height)")
        assert min(sizes) >= 44
        for button in ("#keys button[value='7']", "#keep", "#unclear", "#undo", "#back"):
            tab.click(button)
            idle(tab)
        assert text(tab, "place") == "2 of 8"
        rows = [decisions(tmp_path)[suspect.example] for suspect in review.suspects[:2]]
        assert [row.new for row in rows] == [7, review.suspects[1].label]


def test_class_number_is_typed_if_there_are_more_than_ten_classes(tmp_path: Path) -> None:
    review = new_review(tmp_path, num_classes=26)
    with page(review) as tab:
        tab.press("7", "1", "4", "2", "Enter", "2", "Backspace", "9", "3", "9", "5")
        idle(tab)
        rows = [decisions(tmp_path)[suspect.example].new for suspect in review.suspects[:5]]
        assert rows == [7, 14, 2, 9, 3]
        assert text(tab, "decided") == "7 of 8"  # 9 and 5 decided two more


def test_page_reports_a_stopped_server_and_counts_nothing(tmp_path: Path) -> None:
    review = new_review(tmp_path)
    with contextlib.ExitStack() as stack:
        with served(review) as address:
            tab = stack.enter_context(opened(address))
        tab.press(" ")
        idle(tab)
        assert "The server does not answer" in text(tab, "fault")
        assert text(tab, "decided") == "0 of 8"
        assert text(tab, "place") == "1 of 8"


def break_images(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the indexes whose images are refused, for a test to change."""
    refused: set[int] = set()
    images = Review.images

    def refusing(review: Review, index: int) -> dict[str, Any]:
        if index in refused:
            raise UserError("no image")
        return images(review, index)

    monkeypatch.setattr(Review, "images", refusing)
    return refused


def press_at_once(tab: Browser, *keys: str) -> None:
    """Press keys before the page does anything about the first, then wait until it has done all of it."""
    tab.run(f"{list(keys)}.forEach(key => document.dispatchEvent(new KeyboardEvent('keydown', {{key}})))")
    idle(tab)


def test_key_does_not_decide_about_an_image_that_did_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    review, refused = new_review(tmp_path), break_images(monkeypatch)
    refused.add(1)
    with page(review) as tab:
        press_at_once(tab, " ", "u", "u")
        assert text(tab, "fault") == "no image"
        assert text(tab, "place") == "1 of 8"
        (row,) = decisions(tmp_path).values()
        assert (row.example, row.new) == (review.suspects[0].example, review.suspects[0].label)
        refused.clear()
        press_at_once(tab, "ArrowRight", "u")
        assert text(tab, "place") == "3 of 8"
        assert set(decisions(tmp_path)) == {suspect.example for suspect in review.suspects[:2]}
