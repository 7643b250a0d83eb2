"""Starting and stopping: a few lines of Python stand in for SGLang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from mtp_demo import server as demo_server
from mtp_demo.server import Server, ServerError, free_port, require_health, server_environment

from ..clients import wait_for
from .conftest import gone

SERVES = """
import http.server, json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = 404 if "nothing" in self.path else 200
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps({"path": self.path}).encode())
    def log_message(self, *arguments): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
HANGS = "import time; print('Load weight begin', flush=True); time.sleep(600)"
DIES = "print('[rank 0] no such model', flush=True); raise SystemExit(7)"


@pytest.fixture
def make(tmp_path):
    servers = []

    def build(program: str) -> Server:
        servers.append(Server([sys.executable, "-c", program], device="cpu", log=tmp_path / "server.log"))
        return servers[-1]

    yield build
    for server in servers:
        server.stop()


def test_a_server_is_waited_for_asked_and_stopped_with_its_children(make):
    server = make(SERVES)
    server.start(timeout=60)
    child = int(server.log.read_text().split()[1])
    assert psutil.pid_exists(child)
    require_health(server.port, "")
    assert server.get("/server_info") == {"path": "/server_info"}
    with pytest.raises(ServerError, match="HTTP 404"):
        server.get("/nothing")
    server.stop()
    assert gone(child)
    server.stop()
    with pytest.raises(ServerError):
        server.get("/server_info")


def test_a_server_that_dies_shows_its_log(make):
    with pytest.raises(ServerError, match=r"status 7(.|\n)*no such model"):
        make(DIES).start(timeout=60)


def test_a_server_that_hangs_is_given_up(make):
    heard = []
    with pytest.raises(ServerError, match=r"within 5 s(.|\n)*Load weight begin"):
        make(HANGS).start(timeout=5, on_wait=lambda seconds, stage: heard.append(stage))
    assert "loading weights" in heard


def test_a_port_without_a_server_is_told():
    port = free_port()
    with pytest.raises(ServerError, match=rf"no server answers at \S+:{port}/health: .*refused.*; start one"):
        require_health(port, "start one")


def test_an_interrupted_stop_still_kills(make):
    server = make("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); " + HANGS)
    with pytest.raises(ServerError, match="within 1 s"):
        server.start(timeout=1)
    process = server._process
    assert wait_for(lambda: "1" in server.log.read_text(), 60)  # the signal is ignored by now

    class Impatient(Exception):
        pass

    def ring(number, frame):
        raise Impatient

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Impatient):
            server.stop()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert process.returncode == -signal.SIGKILL


def test_a_server_does_not_outlive_the_demo(tmp_path):
    """Even if the demo is killed outright."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'launch' / 'demo')!r})\n"
        "from pathlib import Path\nfrom mtp_demo.server import Server\n"
        f"server = Server([sys.executable, '-c', {HANGS!r}], device='cpu', log=Path({str(tmp_path / 'log')!r}))\n"
        "server.start(on_wait=lambda seconds, line: print(server._process.pid, flush=True))\n"
    )
    demo = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(demo.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(demo.pid, signal.SIGKILL)
    demo.communicate()
    assert gone(pid)


def test_a_server_listens_on_this_machine_alone(tmp_path):
    """The last flag counts: whatever the command before says."""
    server = Server(["launch", "--host", "0.0.0.0", "--port", "1"], device="cpu", log=tmp_path / "log")
    assert server.command[-4:] == ["--host", "127.0.0.1", "--port", str(server.port)]


def test_a_port_is_drawn_below_those_of_connections_and_none_in_use(monkeypatch):
    taken = free_port()
    assert 1024 < taken < 32768
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        monkeypatch.setattr(demo_server, "PORTS", (taken, taken + 9))
        assert {free_port() for _ in range(40)} <= set(range(taken + 1, taken + 9))


def test_the_environment_of_a_server():
    environment = server_environment("cpu", {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/h"})
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert "OMP_NUM_THREADS" not in server_environment("cuda", {})
