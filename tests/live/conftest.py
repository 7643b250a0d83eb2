"""A server of HTTP alone, that answers what a real one once answered.

``metrics-colons.txt``, ``metrics-underscores.txt`` (within the same second, as SGLang answers by itself and as
OpenMetrics) and ``server_info.json`` are from SGLang 0.5.23 on a CPU under load: tiny-gdn, NEXTN with 4 nodes, replay,
rewind, at most 6 requests. Kept are the metrics that are read and a few others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

HERE = Path(__file__).parent
METRICS = {style: (HERE / f"metrics-{style}.txt").read_text() for style in ("colons", "underscores")}
INFO = (HERE / "server_info.json").read_text()


class Fake:
    """Answers by path: status and text, to be changed at will."""

    def __init__(self) -> None:
        self.answers = {"/metrics": (200, METRICS["colons"]), "/server_info": (200, INFO)}
        self.first = METRICS["colons"]
        self.asked: list[str] = []
        self._start(0)

    def _start(self, port: int) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append(self.path)
                status, text = fake.answers.get(self.path, (404, "Not Found"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Nobody listens any more."""
        self._server.shutdown()
        self._server.server_close()

    def start_again(self) -> None:
        """At the same port."""
        self._start(self.port)


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.stop()
