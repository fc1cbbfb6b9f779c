"""The page in a real browser: drawing with a mouse and a finger, clearing with a key, dropping images."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, browser, needs_chromium
from factories import image_file
from server_process import Server, server

from gradtrail.serving.images import decode_image
from gradtrail.stages.model.exported import read_export

TOKEN = "a-secret-of-32-characters-or-so"  # noqa: S105
ANSWER = "document.querySelector('#answer').textContent"
PROBABILITIES = "[...document.querySelectorAll('#bars progress')].map((each) => each.value)"

pytestmark = [pytest.mark.slow, needs_chromium]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Server]:
    with server(folder) as running:
        yield running


@pytest.fixture
def page(running: Server, tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as page:
        page.size(1000, 800)
        page.open(f"{running.address}/")
        yield page
        assert all(address.startswith(f"{running.address}/") for address in page.requests), page.requests
        assert not page.errors


def stroke(page: Browser, points: list[tuple[float, float]], *, touch: bool = False) -> None:
    """Draw a line over the paper; points are shares of its sides."""
    left, top, width, height = page.box("#paper")
    places = [{"x": left + x * width, "y": top + y * height} for x, y in points]
    if touch:
        for kind, points_now in (
            ("touchStart", places[:1]),
            *(("touchMove", [place]) for place in places[1:]),
            ("touchEnd", []),
        ):
            page.ask("Input.dispatchTouchEvent", type=kind, touchPoints=points_now)
        return
    common: dict[str, Any] = {"button": "left", "buttons": 1, "clickCount": 1}
    page.ask("Input.dispatchMouseEvent", type="mousePressed", **places[0], **common)
    for place in places[1:]:
        page.ask("Input.dispatchMouseEvent", type="mouseMoved", **place, **common)
    page.ask("Input.dispatchMouseEvent", type="mouseReleased", **places[-1], **common)


SEVEN = [(0.3, 0.25), (0.7, 0.25), (0.45, 0.8)]


def drop(page: Browser, content: bytes, kind: str) -> None:
    """Drop a file on the paper."""
    script = f"""(() => {{
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array({json.dumps([*content])})], "dropped", {{type: "{kind}"}}));
      document.querySelector("#paper").dispatchEvent(new DragEvent("drop", {{bubbles: true, dataTransfer: data}}));
    }})()"""
    page.run(script)


def seven() -> bytes:
    """Return a seven in dark ink on bright paper, as a person may have photographed it."""
    drawn = np.full((90, 70), 240, np.uint8)
    drawn[20:26, 20:50] = 20
    for row in range(26, 70):
        drawn[row, 49 - (row - 26) // 2 - 4 : 49 - (row - 26) // 2] = 20
    return image_file(drawn)


@pytest.mark.parametrize("touch", [False, True], ids=["mouse", "finger"])
def test_drawn_digit_is_answered_with_a_bar_per_class(page: Browser, folder: Path, tmp_path: Path, touch: bool) -> None:
    if touch:
        page.size(390, 844, touch=True)
    assert page.run(ANSWER) == "Draw an image."
    stroke(page, SEVEN, touch=touch)
    values = page.wait(f"{PROBABILITIES}.length === 10 && {PROBABILITIES}")
    assert sum(values) == pytest.approx(1, abs=1e-3)
    best = int(np.argmax(values))
    assert page.run(ANSWER) == f"{best}, with {100 * values[best]:.1f} %"
    assert page.run("document.querySelector('li.best').firstChild.textContent") == str(best)
    assert "digits, version" in page.run("document.querySelector('#model').textContent")
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_escape_and_the_button_clear_and_late_answers_are_ignored(page: Browser) -> None:
    stroke(page, SEVEN)
    page.wait(f"{PROBABILITIES}.length === 10")
    page.press("Escape")
    assert page.run(PROBABILITIES) == []
    assert page.run(ANSWER) == "Draw an image."
    assert not page.run(
        "new Uint32Array(pen.getImageData(0, 0, 280, 280).data.buffer).some((each) => each !== 0xff000000)"
    )
    stroke(page, SEVEN)
    page.click("#clear")
    page.run("fetch('/v2').then((answer) => answer.text())")  # by then the answer to the drawing has come
    assert page.run(PROBABILITIES) == []


def test_dropped_picture_is_converted_as_by_predict(page: Browser, folder: Path) -> None:
    content = seven()
    drop(page, content, "image/png")
    values = page.wait(f"{PROBABILITIES}.length === 10 && {PROBABILITIES}")
    model = read_export(folder)
    image = decode_image(io.BytesIO(content), (28, 28), model.manifest.dataset)
    np.testing.assert_allclose(values, model.predict(image[None])[0], rtol=1e-4)
    pixels = "[...document.querySelector('#seen canvas').getContext('2d').getImageData(0, 0, 28, 28).data]"
    np.testing.assert_array_equal(np.array(page.run(pixels)).reshape(28, 28, 4)[..., 0], image)


def test_invalid_picture_shows_the_error(page: Browser) -> None:
    drop(page, b"GIF89a", "image/gif")
    page.wait(f"{ANSWER} === 'the image must be a PNG or a JPEG'")
    page.errors.clear()  # the browser logs the status


def test_page_works_with_the_keyboard_alone(page: Browser) -> None:
    focused = []
    for _ in range(3):
        page.press("Tab")
        focused.append(page.run("document.activeElement.id || document.activeElement.tagName"))
    assert focused == ["paper", "clear", "LABEL"]


def test_page_asks_for_the_token_and_continues(folder: Path, tmp_path: Path) -> None:
    with server(folder, GRADTRAIL_TOKEN=TOKEN) as guarded, browser(tmp_path / "profile") as page:
        page.size(1000, 800)
        page.open(f"{guarded.address}/")
        stroke(page, SEVEN)
        page.wait("!document.querySelector('#token').hidden")
        assert page.run("document.activeElement.type") == "password"
        page.press(*TOKEN)
        page.press("Enter")
        page.wait(f"{PROBABILITIES}.length === 10")
        assert TOKEN not in page.run("document.documentElement.outerHTML")
