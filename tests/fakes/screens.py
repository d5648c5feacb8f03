"""Chromium, driven over its debugging pipe: it opens pages, evaluates, types, and keeps what they complain of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from tests.fakes.processes import PATIENCE_S, wait_for

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)
# The pipe has to be files 3 and 4 of the browser.
_PIPED = """\
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 64) for number in sys.argv[1:3]]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class BrowserError(Exception):
    """The browser refused, or something did not come in time."""


class Browser:
    """One headless browser with a profile of its own in `folder`, from `with` until its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[int, SimpleQueue[dict[str, Any]]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> Self:
        assert CHROMIUM is not None
        from_us, self._to = os.pipe()
        self._from, to_us = os.pipe()
        profile = (f"--user-data-dir={self._folder / 'profile'}", "about:blank")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PIPED, str(from_us), str(to_us), CHROMIUM, *FLAGS, *profile],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)
        os.close(self._to)

    def open(self, url: str, *, width: int = 1280, dark: bool = False) -> Tab:
        """Open a page in a window of its own, and wait until it has loaded."""
        target = self.send("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Runtime", "Log", "Page"):
            tab.send(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tab.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.send("Emulation.setEmulatedMedia", features=[feature])
        tab.send("Page.navigate", url=url)
        tab.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        return tab

    def send(self, method: str, *, session: str = "", **parameters: Any) -> dict[str, Any]:
        with self._lock:
            self._number += 1
            number = self._number
            answers = self._answers[number] = SimpleQueue()
            message = {"id": number, "method": method, "params": parameters}
            os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        try:
            answer = answers.get(timeout=PATIENCE_S)
        except Empty:
            raise BrowserError(f"no answer to {method}") from None
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> None:
        waiting = b""
        with os.fdopen(self._from, "rb", buffering=0) as pipe:
            while content := pipe.read(1 << 16):
                *messages, waiting = (waiting + content).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.pop(message["id"]).put(message)
                    elif message.get("sessionId") in self._tabs:
                        self._tabs[message["sessionId"]].take(message)


class Tab:
    """One page. `complaints` are its errors, and what its policy kept it from."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []

    def take(self, message: dict[str, Any]) -> None:
        what = message["params"]
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(what["exceptionDetails"]))
        elif message["method"] == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning"):
            self.complaints.append(str(what["args"]))
        elif message["method"] == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, session=self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Return the words that the first node that matches shows."""
        shown = self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return " ".join(str(shown).split())

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def wait_for_text(self, selector: str, words: str) -> None:
        text = f"(document.querySelector({json.dumps(selector)})?.textContent ?? '')"
        self.wait_for(f"{text}.replace(/\\s+/g, ' ').includes({json.dumps(words)})")

    def wait_for(self, expression: str) -> None:
        def holds() -> Any:
            with suppress(BrowserError):  # in the middle of a navigation
                return self.evaluate(f"!!({expression})")

        wait_for(holds, every_s=0.05, otherwise=lambda: f"{expression}; complaints: {self.complaints}")
