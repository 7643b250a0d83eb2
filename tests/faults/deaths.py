"""A real server, asked, then one of its processes killed outright while requests decode."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from mtp_demo import client
from mtp_demo.options import DATA
from mtp_demo.run import DEVICE_FLAGS, attention_backend
from mtp_demo.server import Server
from tokenizers import Tokenizer

from ..clients import START, Client, wait_for

MODEL = Path(__file__).parents[2] / "launch" / "models" / "tiny-gdn"
DEVICE = "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
TOKENS = 6000
"""More than are said before the server dies, and within the tiny models' 8192."""
RUNNING = 3
"""Requests that run at a time; one more has to wait."""
PROBLEMS = client.read_problems(DATA / "test.jsonl", RUNNING)
FLAGS = (
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    *("--max-running-requests", str(RUNNING)),
)
PATIENCE = 300.0
"""Seconds after which what has not happened will not."""


@dataclass(frozen=True)
class Fault:
    """How many ranks the server has, and the title of the process of it that is killed."""

    ranks: int
    victim: str


@dataclass(frozen=True)
class Death:
    """What a server did, and what was left of it.

    answers: to `PROBLEMS`, while it lived. clients: those it left alone, by name: two that hear their answer as it
    comes, one that waits for the whole of it, one whose turn has not come, and one that came when the process was dead.
    hung: those that still waited `PATIENCE` seconds after. status: the server's exit status, None if it was still there
    then. left: titles of the processes that were. log: what it printed.
    """

    answers: tuple[client.Answer, ...]
    clients: dict[str, Client]
    hung: list[str]
    status: int | None
    left: list[str]
    log: str


def die(fault: Fault, port: int, log: Path) -> Death:
    """Serve at ``port``, ask, kill, and wait for the end.

    Raises ServerError if the server does not start or does not answer before the kill.
    """
    server = Server(_command(fault.ranks), device=DEVICE, log=log, port=port)
    try:
        server.start(timeout=START)
        prompts = _prompts()
        answers = client.ask_all(server, prompts, max_new_tokens=200, parallel=RUNNING).answers
        clients = {
            "whole": Client(port, prompts[0], TOKENS, stream=False),
            "streamed": Client(port, prompts[1], TOKENS),
            "openai": Client(port, prompts[2], TOKENS, path="/v1/completions"),
        }
        heard = [clients["streamed"], clients["openai"]]
        if not wait_for(lambda: all(len(each.told) > 60 for each in heard), PATIENCE):
            raise AssertionError(f"nobody was told anything: {[each.error for each in heard]}\n{server.tail()}")
        clients["waiting"] = Client(port, prompts[0], TOKENS)
        process = server._process
        family = processes_of(process.pid)
        titles = {each.pid: each.cmdline()[0] for each in family}
        (victim,) = [each for each in family if titles[each.pid] == fault.victim]
        victim.kill()
        clients["late"] = Client(port, prompts[1], TOKENS, stream=False)
        wait_for(lambda: not any(each.is_alive() for each in clients.values()), PATIENCE)
        # a process that is over to others has threads to end yet before its parent can be told its status
        wait_for(lambda: process.poll() is not None and not processes_of(process.pid), PATIENCE)
        status, hung = process.poll(), [name for name, each in clients.items() if each.is_alive()]
        left = [titles.get(each.pid, each.name()) for each in processes_of(process.pid)]
    finally:
        server.stop()
    return Death(answers, clients, hung, status, left, log.read_text(errors="replace"))


def processes_of(session: int) -> list[psutil.Process]:
    """The processes of a session that are not over, whoever their parents are by now."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


def _command(ranks: int) -> list[str]:
    options = ["--model-path", str(MODEL), *DEVICE_FLAGS[DEVICE], *FLAGS, "--tp", str(ranks)]
    options += ["--dtype", "float32"] if DEVICE == "cpu" else ["--attention-backend", attention_backend(MODEL)]
    return [sys.executable, "-m", "sglang.launch_server", *options]


def _prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    shots = client.read_problems(DATA / "train.jsonl", 2)
    return [tokenizer.encode(client.prompt_text(shots, problem.question)).ids for problem in PROBLEMS]
