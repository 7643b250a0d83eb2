"""A headless Chromium, told what to do over its DevTools protocol (with tornado, which comes with Bokeh)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60
#: All elements, through the shadow roots that Bokeh draws into; ``text`` and ``value`` look among them.
_ELEMENTS = """
(() => {
  const all = [];
  const walk = (root) => root.querySelectorAll('*').forEach((e) => {
    all.push(e);
    if (e.shadowRoot) walk(e.shadowRoot);
  });
  walk(document);
  const shown = (e) => e.checkVisibility();
  const value = (name) => all.find((e) => e.dataset && e.dataset.value === name)?.textContent ?? null;
  const text = (selector) => all.filter((e) => e.matches(selector) && shown(e)).map((e) => e.textContent).join(' | ');
  return %s;
})()
"""


def installed() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """An open page."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.hosts: set[str] = set()
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call ``method`` of the protocol; what the page asks of whom and complains of meanwhile is kept."""
        number = next(self._numbers)
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = await asyncio.wait_for(self._socket.read_message(), SECONDS)
            assert answer is not None, "Chromium has ended"
            told = json.loads(answer)
            self._note(told.get("method"), told.get("params", {}))
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]

    def _note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.hosts.add(urlsplit(told["request"]["url"]).netloc)
        elif event == "Network.webSocketCreated":
            self.hosts.add(urlsplit(told["url"]).netloc)
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.complaints.append(str(told["args"]))

    async def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        for domain in ("Network", "Runtime", "Page"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression that may use ``all``, ``shown``, ``value(name)``, ``text(selector)``."""
        told = await self.call("Runtime.evaluate", expression=_ELEMENTS % expression, returnByValue=True)
        return told["result"].get("value")

    async def wait(self, expression: str, seconds: float = SECONDS) -> Any:
        """Its value as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = await self.ask(expression)
            if found:
                return found
            await asyncio.sleep(0.2)
        shown = await self.ask("text('div')")
        raise AssertionError(f"{expression} within {seconds} s; shown: {shown}; {self.complaints}")

    async def picture(self, path: Path) -> bytes:
        """The page as PNG, written to ``path``."""
        png = base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])
        path.write_bytes(png)
        return png


@contextlib.asynccontextmanager
async def tab(folder: Path):
    """A `Tab` of a Chromium that keeps what it writes in ``folder``."""
    command = [installed(), "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--disable-dev-shm-usage"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield Tab(await websocket_connect(await _debugger(folder / "DevToolsActivePort"), max_message_size=2**26))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _debugger(file: Path) -> str:
    """The websocket of the first page."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if file.is_file() and len(lines := file.read_text().splitlines()) == 2:
            answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{lines[0]}/json/list")
            pages = [page for page in json.loads(answer.body) if page["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        await asyncio.sleep(0.1)
    raise AssertionError("Chromium did not start")
