"""A real browser for tests: Chromium without a window, driven by its DevTools protocol.

`with Browser(url, width=390, height=844, dark=True) as page: page.press("4"); page.wait("document.title")`
"""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
_SECONDS = 60  # that a start or an awaited state of a page may take
_NAMES = {" ": "Space"}
_TEXT = {"Enter": "\r"}  # that named keys type


class Browser:
    """A page in a browser of its own, with an empty profile.

    Args:
        url: of the page.
        width: of the window, in pixels.
        height: of the window, in pixels.
        dark: whether dark colours are preferred.
        touch: whether fingers point, as on a phone.
    """

    def __init__(self, url: str, *, width: int = 1440, height: int = 900, dark: bool = False, touch: bool = False):
        self._loop = asyncio.new_event_loop()
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._url, self._screen, self._scheme, self._touch = url, (width, height), "dark" if dark else "light", touch
        self._number = 0
        self.messages: list[str] = []  # errors and warnings of the page, in their order

    def __enter__(self) -> "Browser":
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-proxy-server",
            "--remote-debugging-port=0",
        ]
        command = [str(CHROMIUM), *flags, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._loop.run_until_complete(self._connect())
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            width, height = self._screen
            self.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=self._touch,
            )
            self.call("Emulation.setTouchEmulationEnabled", enabled=self._touch)
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": self._scheme}])
            self.open(self._url)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if hasattr(self, "_session"):
            self._loop.run_until_complete(self._session.close())
        self._process.kill()
        self._process.wait()
        self._loop.close()
        self._profile.cleanup()

    def open(self, url: str) -> None:
        """Open an address, and wait until it is loaded."""
        answer = self.call("Page.navigate", url=url)
        assert not answer.get("errorText"), (url, answer)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + _SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {value!r}; the page says {self.messages}"
            time.sleep(0.02)
        return value

    def press(self, *keys: str) -> None:
        """Press keys, each named as in `KeyboardEvent.key`."""
        for key in keys:
            text = _TEXT.get(key, key if len(key) == 1 else "")
            about = {"key": key, "code": _NAMES.get(key, key)}
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, or tap it."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        if self._touch:
            self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
            self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            return
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command of the DevTools protocol."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, params), _SECONDS))

    async def _connect(self) -> None:
        port_file, deadline = Path(self._profile.name) / "DevToolsActivePort", time.monotonic() + _SECONDS
        while not (port_file.is_file() and port_file.read_text().count("\n")):
            assert self._process.poll() is None, "chromium does not start"
            assert time.monotonic() < deadline, "chromium does not start"
            await asyncio.sleep(0.02)
        self._session = aiohttp.ClientSession()
        address = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/list"
        async with self._session.get(address) as answer:
            targets = await answer.json()
        page = next(target for target in targets if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
