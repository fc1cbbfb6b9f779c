"""A real browser for tests: Chromium, spoken to over its debugging pipe, with nothing but the standard library."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome is installed")
_LONGEST = 120.0  # seconds that no answer takes
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "End": (35, ""), "Home": (36, "")}
_KEYS |= {"ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, "")}


class Browser:
    """A page in a browser of its own."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._received, self._number, self._session = b"", 0, ""
        self._loaded = self._touch = False
        self.requests: list[str] = []  # addresses that the page asked for, its own among them; `data:` is none
        self.errors: list[str] = []  # what the page threw or logged as an error
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def open(self, page: Path | str) -> None:
        """Open a file or an address, and wait until it is loaded."""
        self._loaded = False
        self.requests.clear()
        self.ask("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while not self._loaded:
            self._next()

    def size(self, width: int, height: int, *, touch: bool = False) -> None:
        """Make the window this large, in pixels; with `touch`, fingers point, as on a phone."""
        self._touch = touch
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.ask("Emulation.setTouchEmulationEnabled", enabled=touch)

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of a JavaScript expression once it is true."""
        deadline = time.monotonic() + _LONGEST
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {value!r}; the page says {self.errors}"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """Scroll an element into the window and click or tap in its middle."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        left, top, width, height = self.box(selector)
        if self._touch:
            point = {"x": left + width / 2, "y": top + height / 2}
            self.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
            self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            return
        place = {"x": left + width / 2, "y": top + height / 2, "button": "left", "clickCount": 1}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **place)

    def box(self, selector: str) -> list[float]:
        """Return left, top, width and height of an element in the window."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        return list(self.run(f"(({{x, y, width, height}}) => [x, y, width, height])({box})"))

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        for key in keys:
            code, text = _KEYS.get(key, (ord(key[0].upper()), key))
            common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
            self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def _next(self) -> dict[str, Any]:
        """Return the next message; those that are events are noted."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._reading], [], [], _LONGEST)
            assert ready, "the browser does not answer"
            part = os.read(self._reading, 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("data:"):
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with an empty profile; it ends with the context."""
    assert CHROMIUM
    ours, theirs = os.pipe(), os.pipe()  # what we write, and what it writes
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
    redirected = f'exec "$0" "$@" 3</dev/fd/{ours[0]} 4>/dev/fd/{theirs[1]}'
    process = subprocess.Popen(
        ["sh", "-c", redirected, CHROMIUM, *flags, f"--user-data-dir={profile}"],
        pass_fds=(ours[0], theirs[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        page = Browser(theirs[0], ours[1])
        yield page
        with suppress(AssertionError, OSError):
            page._session = ""
            page.ask("Browser.close")
    finally:
        os.close(ours[1])
        os.close(theirs[0])
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        process.kill()
        process.wait()
