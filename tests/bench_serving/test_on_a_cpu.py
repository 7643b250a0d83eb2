"""The whole of it on a tiny model: a server, four loads, the record; and an interruption while a server starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ..clients import START
from .conftest import ROOT

pytestmark = pytest.mark.once

MODEL = ROOT / "launch" / "models" / "tiny-gdn"


def command(tmp_path: Path, *flags: str) -> list[str]:
    program = str(ROOT / "launch" / "bench" / "bench_serving.py")
    where = ["--out", str(tmp_path / "r.json"), "--logs", str(tmp_path / "logs")]
    return [sys.executable, program, "--model-path", str(MODEL), "--device", "cpu", "--quick", *where, *flags]


def content(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "r.json").read_text())


def test_a_server_and_its_loads(tmp_path):
    flags = ["--modes", "rewind", "--concurrency", "1,3", "--accept", "3", "--output-len", "24"]
    flags += ["--request-rate", "2", "--rate-seconds", "2", "--max-running-requests", "3"]
    flags += ["--conversations", "3", "--turns", "3", "--turn-len", "7"]
    told = subprocess.run(command(tmp_path, *flags), cwd=ROOT, capture_output=True, text=True, timeout=START)
    assert told.returncode == 0, told.stdout + told.stderr
    found = content(tmp_path)
    assert found["ended"] == "complete"
    (server,) = found["servers"]
    assert server["plugin"]["mode"] == "replay"
    assert server["max_running_requests"] == 3
    assert server["state_slots"] > 3
    first, second, at_a_rate = found["loads"]
    assert (at_a_rate["load"], at_a_rate["request_rate"], at_a_rate["concurrency"]) == ("2/s", 2.0, None)
    for load, requests in ((first, 1), (second, 3), (at_a_rate, at_a_rate["prompts"])):
        assert load["server"] == 0
        figures, seen = load["bench_serving"], load["server_log"]
        assert figures["total_output_tokens"] == 24 * requests
        assert figures["total_input_tokens"] == 32 * requests
        for name in ("output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_itl_ms"):
            assert figures[name] > 0, name
        assert load is at_a_rate or seen["running_peak"] == requests
        assert seen["retractions"] == 0
        assert seen["accept_length"] == 3.0  # simulated: every step of every request
    assert (tmp_path / "r-throughput.png").is_file()
    assert "rewind/chain4" in told.stdout
    check_conversations(found["conversations"])
    assert not processes_of(tmp_path)


WAYS = {"none": None, "stock": None, "slots": "slots", "replay": "replay", "rewind": "replay"}
"""Ways to serve on a CPU, and the plugin's mode in each."""


@pytest.mark.parametrize("ways", [("none", "slots"), pytest.param(tuple(WAYS), marks=pytest.mark.slow)])
def test_one_server_after_the_other(ways: tuple[str, ...], tmp_path):
    """What README's line measures, with less of each; what cannot run here is told and left out."""
    flags = ["--concurrency", "2", "--accept", "3", "--output-len", "24", "--max-running-requests", "3", "--no-plots"]
    if len(ways) < len(WAYS):
        flags += ["--modes", ",".join([*ways, "replayssm"])]
    told = subprocess.run(command(tmp_path, *flags), cwd=ROOT, capture_output=True, text=True, timeout=5 * START)
    assert told.returncode == 0, told.stdout + told.stderr
    found = content(tmp_path)
    assert (found["ended"], list(found["refused"])) == ("complete", ["replayssm/chain4"])
    assert [load["serving"] for load in found["loads"]] == [w if w == "none" else f"{w}/chain4" for w in ways]
    for load in found["loads"]:
        assert load["bench_serving"]["total_output_tokens"] == 2 * 24
        assert load["server_log"]["accept_length"] == (None if load["serving"] == "none" else 3.0)
    modes = [server["plugin"] and server["plugin"]["mode"] for server in found["servers"]]
    assert modes == [WAYS[way] for way in ways]
    assert not processes_of(tmp_path)


def check_conversations(entries: list[dict]) -> None:
    """Nothing of an earlier turn is computed again. Answers are one token of the prefill and three a step: their last
    token was accepted, so it is in the state too."""
    (entry,) = entries
    answers, seen = entry["answers"], entry["server_log"]
    assert (entry["load"], entry["server"]) == ("3 conversations of 3 turns", 0)
    assert answers["total_output_tokens"] == 3 * 3 * 24
    assert seen["running_peak"] == 3
    first, second, third = answers["turns"]
    assert (first["prompt_tokens"], first["cached_tokens"], first["last_turn_tokens"]) == (32, 0, None)
    assert (second["prompt_tokens"], second["last_turn_tokens"]) == (32 + 24 + 7, 32 + 24)
    assert (third["prompt_tokens"], third["last_turn_tokens"]) == (63 + 24 + 7, 63 + 24)
    for turn in (second, third):
        assert turn["min_cached_tokens"] == turn["cached_tokens"] == turn["last_turn_tokens"]
        assert (turn["cached_share"], turn["computed_tokens"]) == (1.0, 7)
    for turn in answers["turns"]:
        assert 0 < turn["median_ttft_ms"] <= turn["p99_ttft_ms"]


def test_an_interruption_leaves_no_server(tmp_path):
    running = subprocess.Popen(command(tmp_path, "--modes", "none"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2400):
            if processes_of(tmp_path):
                break
            time.sleep(0.25)
        assert processes_of(tmp_path)
        os.kill(running.pid, signal.SIGTERM)
        told, _ = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 128 + signal.SIGTERM
    assert "interrupted: no server is left" in told
    assert content(tmp_path)["ended"] == "interrupted"
    assert not processes_of(tmp_path)


def processes_of(tmp_path: Path) -> list[int]:
    """Servers this test started: those that write to its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "sglang" in " ".join(process.cmdline()) and str(tmp_path) in process.environ().get(
                "MTP_BENCH_SERVER_LOG", ""
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
