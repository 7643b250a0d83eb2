"""Ctrl-C while a server starts: the right status, nothing left running, and the JSON says so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from .conftest import ROOT, gone

# A server that never answers, deaf to SIGTERM, with a child in a session of its own.
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", __import__("os").getpid(), child.pid, flush=True)
time.sleep(600)
"""

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT / "launch" / "demo")!r})
from mtp_demo import server
server.STOP_SECONDS = 0.5
command, log = [sys.executable, "-c", {DEAF!r}], sys.argv.pop(1)
class Deaf(server.Server):
    def __init__(self, ignored, *, device, log):
        super().__init__(command, device=device, log=server.Path(sys.log))
sys.log, server.Server = log, Deaf
import runpy
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def interrupt(tmp_path, script, arguments, number):
    """Run a program of launch/demo, send ``number`` once its server runs; returns it, its output, the server's pids."""
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", PROGRAM, str(log), str(ROOT / "launch" / "demo" / script), *arguments]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (log.exists() and "\n" in log.read_text()):
        assert time.monotonic() < deadline and program.poll() is None, program.communicate()[0]
        time.sleep(0.05)
    for _ in range(3):  # an impatient user
        program.send_signal(number)
        time.sleep(0.2)
    output, _ = program.communicate(timeout=60)
    return program, output, [int(pid) for pid in log.read_text().split()[1:]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo(tmp_path, number):
    path = tmp_path / "r.json"
    arguments = ["--model", "gdn", "--device", "cpu", "--json", str(path), "--logs", str(tmp_path)]
    program, output, pids = interrupt(tmp_path, "main.py", arguments, number)
    assert program.returncode == 128 + number
    assert len(pids) == 2 and all(map(gone, pids))
    content = json.loads(path.read_text())
    assert (content["passed"], content["interrupted"]) == (False, number.name)
    (error,) = content["errors"]
    assert error.startswith(f"interrupted by {number.name}") and error.endswith("no server is left running")
    assert error in output and "Traceback" not in output


def test_the_evaluation(tmp_path):
    arguments = ["--questions", "5", "--parallel", "1"]
    program, output, pids = interrupt(tmp_path, "gsm8k.py", arguments, signal.SIGINT)
    assert program.returncode == 130
    assert len(pids) == 2 and all(map(gone, pids))
    assert "interrupted by SIGINT (Ctrl-C)" in output and "Traceback" not in output


def test_only_the_first_signal_interrupts():
    program = (
        f"import os, sys; sys.path.insert(0, {str(ROOT / 'launch' / 'demo')!r})\n"
        "from mtp_demo import interrupt\n"
        "interrupt.catch()\n"
        "try: os.kill(os.getpid(), 2)\n"
        "except interrupt.Interrupted as first: os.kill(os.getpid(), 2); os.kill(os.getpid(), 15); print(first)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, "interrupted by SIGINT (Ctrl-C)\n"), told.stderr
