"""The command: what it refuses, what it imports, and what it serves over HTTP and a websocket."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mtp_demo.server import free_port

from sglang_mamba_mtp.live import __main__ as command

ROOT = Path(__file__).parents[2]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "127.0.0.1:30000"], "argument --url: 127.0.0.1:30000: expected http://HOST:PORT"),
        (["--port", "0"], "argument --port: 0: expected a port"),
        (["--port", "http"], "argument --port: http: expected a port"),
        (["--interval", "0"], "argument --interval: 0: expected seconds"),
        (["--interval", "nan"], "argument --interval: nan: expected seconds"),
        (["--host", "::1"], "argument --host: '::1': expected an IPv4 address"),
        (["--origin", "*:7000"], "argument --origin: *:7000: expected HOST:PORT"),
        (["--origin", "http://x:1"], "argument --origin: http://x:1: expected HOST:PORT"),
    ],
)
def test_wrong_arguments_end_without_a_traceback(arguments, words, capsys):
    if arguments[0] == "--url":
        pytest.importorskip("bokeh", reason="the live page's extra is not installed")
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "NEEDED", ("no_such_bokeh", "json"))
    assert command.main([]) == 1
    said = capsys.readouterr().err
    assert "needs no_such_bokeh: pip install 'sglang-mamba-mtp[live]'" in said


def test_a_port_in_use_is_named(capsys):
    pytest.importorskip("bokeh", reason="the live page's extra is not installed")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert command.main(["--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_neither_sglang_nor_torch_is_imported():
    pytest.importorskip("bokeh", reason="the live page's extra is not installed")
    code = (
        "import sys, sglang_mamba_mtp.live.__main__, sglang_mamba_mtp.live.serve, sglang_mamba_mtp.live.asking;"
        "print([name for name in ('torch', 'sglang', 'triton', 'mamba_mtp_kernels') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_it_listens_on_this_machine_unless_told():
    assert command.parser().parse_args([]).host == "127.0.0.1"
    assert command.parser().parse_args(["--host", "0.0.0.0"]).host == "0.0.0.0"


def test_origins():
    pytest.importorskip("bokeh", reason="the live page's extra is not installed")
    from sglang_mamba_mtp.live.serve import allowed_origins

    assert allowed_origins("127.0.0.1", 7000) == ["127.0.0.1:7000", "localhost:7000"]
    assert allowed_origins("127.0.0.1", 7000, ["box:80"])[-1] == "box:80"
    assert "10.0.0.5:7000" in allowed_origins("10.0.0.5", 7000)
    everywhere = allowed_origins("0.0.0.0", 7000)
    assert f"{socket.gethostname()}:7000" in everywhere and "localhost:7000" in everywhere
    assert not [origin for origin in everywhere if "*" in origin or origin.startswith("0.0.0.0")]


@contextlib.contextmanager
def running(url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command, watching ``url``; where it answers, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_mamba_mtp.live", "--url", url, "--port", str(port), "--interval", "0.5"]
    env = {**os.environ, "BOKEH_RESOURCES": "cdn"}  # an environment that would fetch from elsewhere
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        first = process.stdout.readline()
        assert f"{url} is shown at http://127.0.0.1:{port}" in first, first + process.stdout.read()
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def page(fake) -> Iterator[str]:
    pytest.importorskip("bokeh", reason="the live page's extra is not installed")
    with running(fake.url) as (url, _):
        yield url


def fetch(url: str) -> str:
    with OPENER.open(url, timeout=30) as answer:
        assert answer.status == 200
        return answer.read().decode()


def test_the_page_is_served_with_all_it_needs(page):
    text = fetch(page)
    assert "<title>mamba-mtp live</title>" in text
    scripts = re.findall(r'<script[^>]* src="([^"]+)"', text)
    assert scripts and all(script.startswith("/static/") for script in scripts)
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    assert "Bokeh" in fetch(page + scripts[0])


def test_what_the_server_says_reaches_the_page_and_follows_it(page, fake):
    from bokeh.client import pull_session
    from bokeh.models import Div

    def shown() -> str:
        session = pull_session(url=page)
        try:
            return " ".join(div.text for div in session.document.select({"type": Div}))
        finally:
            session.close()

    def wait(words: str) -> None:
        end = time.monotonic() + 120
        while words not in (text := shown()):
            assert time.monotonic() < end, text
            time.sleep(0.2)

    wait('data-value="requests waiting">5<')
    fake.answers["/metrics"] = (404, "Not Found")
    wait("Start it with --enable-metrics")
    fake.stop()
    wait("No server answers at")
    fake.answers["/metrics"] = (200, fake.first)
    fake.start_again()
    wait('data-value="requests waiting">5<')


def test_other_sites_cannot_read_along(page):
    from tornado.httpclient import HTTPClientError, HTTPRequest
    from tornado.ioloop import IOLoop
    from tornado.websocket import websocket_connect

    def open_from(origin: str) -> None:
        url = page.replace("http", "ws", 1) + "/ws"
        request = HTTPRequest(url, headers={"Origin": origin, "Sec-WebSocket-Protocol": "bokeh, none"})
        IOLoop(make_current=False).run_sync(lambda: websocket_connect(request))

    with pytest.raises(HTTPClientError, match="403"):
        open_from("http://evil.example:7000")


def test_ctrl_c_ends_it(fake):
    pytest.importorskip("bokeh", reason="the live page's extra is not installed")
    with running(fake.url) as (_, process):
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in output, output
