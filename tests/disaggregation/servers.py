"""A prefill server, a decode server and SGLang's mini load balancer before them; and one server to compare with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from mtp_demo.server import HOST, Server, free_port

from ..clients import START

MODELS = Path(__file__).parents[2] / "launch" / "models"
CHAINS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
FLAGS = ("--device", "cpu", "--dtype", "float32", "--speculative-algorithm", "NEXTN", *CHAINS)
NIXL = ("--disaggregation-transfer-backend", "nixl")
PATIENCE = 600.0
"""Seconds after which what has not happened will not."""


class Pair:
    """One server, a prefill and a decode server of a tiny model, and a load balancer at `balancer`.

    Attributes
        starters: their starts, a thread each. The kernel kills a server with the thread that started it, so these
            threads live until `stop`.
    """

    def __init__(self, family: str, folder: Path, *flags: str) -> None:
        self.folder, self.bootstrap = folder, free_port()
        self._launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODELS / f"tiny-{family}")]
        self._launch += [*FLAGS, *flags]
        self.starters = ThreadPoolExecutor(8)
        self.one = self._server("one")
        self.prefill = self._server("prefill", *self._as_prefill())
        self.decode = self._server("decode", "--disaggregation-mode", "decode", *NIXL)
        self.balancer = self._server("balancer")

    def _as_prefill(self) -> tuple[str, ...]:
        return ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(self.bootstrap), *NIXL)

    def _server(self, name: str, *flags: str, port: int | None = None) -> Server:
        return Server([*self._launch, *flags], device="cpu", log=self.folder / name, port=port)

    def start(self) -> None:
        """Start all. Raises ServerError if one does not start."""
        started = [self.starters.submit(each.start, START) for each in (self.one, self.prefill, self.decode)]
        for each in started:
            each.result()
        urls = [f"http://{HOST}:{server.port}" for server in (self.prefill, self.decode)]
        command = ["--pd-disaggregation", "--mini-lb", "--prefill", urls[0], str(self.bootstrap), "--decode", urls[1]]
        self.balancer = Server(
            [sys.executable, "-m", "sglang_router.launch_router", *command], device="cpu", log=self.folder / "balancer"
        )
        self.starters.submit(self.balancer.start, START).result()

    def stop(self) -> None:
        """Stop whatever runs, whichever of them does not."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.starters.shutdown)
            for server in (self.decode, self.prefill, self.one, self.balancer):
                ends.callback(server.stop)

    def kill_prefill(self) -> None:
        """Kill every process of the prefill server outright."""
        process = psutil.Process(self.prefill._process.pid)
        family = [process, *process.children(recursive=True)]
        for each in family:
            each.kill()
        psutil.wait_procs(family, timeout=PATIENCE)
        self.prefill.stop()

    def start_prefill_again(self) -> None:
        """Another one where the first was."""
        self.prefill = self._server("prefill-2", *self._as_prefill(), port=self.prefill.port)
        self.starters.submit(self.prefill.start, 500.0).result()


def body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A request to ``/generate``."""
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def answers(server: Server, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """What ``server`` says to all of them, asked at once."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: server.post("/generate", body(prompt, tokens), PATIENCE), prompts))
