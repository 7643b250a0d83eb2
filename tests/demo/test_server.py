"""Starting and stopping: a few lines of Python stand in for SGLang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mtp_demo.server import Server, ServerError, free_port, server_environment

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
HANGS = "import time; print('loading', flush=True); time.sleep(600)"
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


def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_server_is_waited_for_asked_and_stopped_with_its_children(make):
    server = make(SERVES)
    server.start(timeout=60)
    child = int(server.last_line().split()[1])
    assert psutil.pid_exists(child)
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
    with pytest.raises(ServerError, match=r"within 2 s(.|\n)*loading"):
        make(HANGS).start(timeout=2, on_wait=lambda seconds, line: heard.append(line))
    assert "loading" in heard


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


def test_ports_and_environment():
    assert 1024 < free_port() < 65536
    environment = server_environment("cpu", {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/h"})
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert "OMP_NUM_THREADS" not in server_environment("cuda", {})
