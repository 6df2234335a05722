"""A real Chromium, driven over a pipe: it opens pages, presses keys and says what went wrong."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

LONGEST = 60.0


def chromium() -> str | None:
    """The program, if the machine has one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    chromium() is None, reason="chromium is not installed: run scripts/chromium"
)


class Browser:
    """A browser with one page. `problems`: errors, warnings of the policy, and requests."""

    def __init__(self, profile: Path, *more: str) -> None:
        program = chromium()
        assert program is not None
        there, here = os.pipe(), os.pipe()
        self._to, self._from = there[1], here[0]
        # The browser reads 3 and writes 4.
        wired = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        fixed = ("--no-first-run", "--disable-extensions", f"--user-data-dir={profile}")
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                wired,
                "-",
                str(there[0]),
                str(here[1]),
                program,
                *options,
                *fixed,
                *more,
            ],
            pass_fds=(there[0], here[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there[0])
        os.close(here[1])
        self._serial, self._rest = 0, b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable", {})

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(LONGEST)
        os.close(self._to)
        os.close(self._from)

    def open(self, file: Path, ready: str) -> None:
        """The page of a file, once the expression `ready` is true."""
        self.visit(file.as_uri(), ready)

    def visit(self, url: str, ready: str) -> None:
        """The page of an address, once the expression `ready` is true."""
        self.problems.clear()
        self.requests.clear()
        self._ask("Page.navigate", {"url": "about:blank"})  # another # alone would load nothing
        self._ask("Page.navigate", {"url": url})
        self.until(ready)

    def until(self, ready: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + LONGEST
        while not self.value(ready):
            assert time.monotonic() < end, self.problems
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What an expression is on the page."""
        asked = {"expression": expression, "returnByValue": True}
        return self._ask("Runtime.evaluate", asked)["result"].get("value")

    def later(self, expression: str) -> Any:
        """What a promise comes to."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        return self._ask("Runtime.evaluate", asked)["result"].get("value")

    def type(self, text: str) -> None:
        """The text, where the focus is."""
        self._ask("Input.insertText", {"text": text})

    def press(self, *keys: str) -> None:
        """The keys, one after another; Shift+Enter: with Shift held."""
        for one in keys:
            key, shift = one.removeprefix("Shift+"), one.startswith("Shift+")
            code = {"Tab": 9, "Enter": 13}.get(key, 0)
            said: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            said["modifiers"] = 8 if shift else 0
            if key == "Enter":
                said["text"] = "\r"
            self._ask("Input.dispatchKeyEvent", {"type": "keyDown", **said})
            self._ask("Input.dispatchKeyEvent", {"type": "keyUp", **said})

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """The page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, clip: dict[str, float] | None = None) -> str:
        """What is seen, or this part of the page, as PNG in base64."""
        part = {} if clip is None else {"clip": clip, "captureBeyondViewport": True}
        return str(self._ask("Page.captureScreenshot", part)["data"])

    def _ask(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        self._serial += 1
        asked: dict[str, Any] = {"id": self._serial, "method": method, "params": given}
        if hasattr(self, "_session"):
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._serial:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], LONGEST)[0], "the browser is silent"
            data = os.read(self._from, 2**16)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(given))
        elif message.get("method") == "Log.entryAdded":
            self.problems.append(str(given["entry"]))
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(str(given))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
