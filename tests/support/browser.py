"""A real Chromium for a test, controlled over two pipes in the DevTools protocol: no driver, no library, no port.

with Browser() as browser, browser.page() as page:
    page.open(url)
    page.wait("document.title == 'rlhfd'")
    assert page.problems == []
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = "chromium"
_TIMEOUT_S = 60.0
_POLL_S = 0.05
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--remote-debugging-pipe",
    # The browser reaches no other host: every name but the daemon's address is unknown.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One headless Chromium with a profile of its own, ended with the block."""

    def __enter__(self) -> Browser:
        self._profile = Path(tempfile.mkdtemp(prefix="rlhfd-browser-"))
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def place() -> None:
            # Chromium reads from 3 and writes to 4; duplicates first, for one may lie on the other's place.
            ends = os.dup(to_read), os.dup(to_write)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [PROGRAM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
            env={**os.environ, "HOME": str(self._profile)},
        )
        os.close(to_read)
        os.close(to_write)
        self._received = bytearray()
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to end, then make it; its profile goes with it."""
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str = "", /, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it go to their pages."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while self._number not in self._answers:
            self._hear(deadline)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    @contextlib.contextmanager
    def page(self, *, width: int = 1280, height: int = 900, phone: bool = False, dark: bool = False) -> Iterator[Page]:
        """Open an empty page of that size, and close it after the block."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        yield page
        self.call("Target.closeTarget", targetId=target)

    def _hear(self, deadline: float) -> None:
        if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"chromium has not answered within {_TIMEOUT_S:g} s")
        data = os.read(self._read, 1 << 20)
        assert data, "chromium has ended"
        self._received += data
        *whole, rest = self._received.split(b"\0")
        self._received = bytearray(rest)
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif page := self._pages.get(message.get("sessionId", "")):
                page.take(message["method"], message["params"])


class Page:
    """A tab.

    Attributes:
        problems: Messages of the console, violations of the page's policy, and exceptions.
        requested: The URL of every request.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._browser = browser
        self._session = session

    def call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol to this tab."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Go to a URL."""
        assert "errorText" not in self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'", "the page is loaded")

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def each(self, selector: str, expression: str) -> list[Any]:
        """Return an expression of each element `e` that a selector finds."""
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => {expression})"))

    def fill(self, selector: str, value: str) -> None:
        """Put a value into a field, as its user would."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"({field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('input')))")

    def wait(self, condition: str, what: str = "", timeout_s: float = _TIMEOUT_S) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(condition)):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s in vain until {what or condition}: {self.problems}")
            time.sleep(_POLL_S)
        return value

    def press(self, key: str, code: int, text: str = "", *, shift: bool = False) -> None:
        """Press a key of the keyboard and let it go."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, height: int = 0) -> None:
        """Write the page, or the top `height` pixels of it, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def take(self, method: str, parameters: dict[str, Any]) -> None:
        """Record an event."""
        match method:
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.problems.append(json.dumps(parameters["entry"]))
            case "Audits.issueAdded":
                self.problems.append(json.dumps(parameters["issue"]))
