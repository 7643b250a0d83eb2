"""A prefill server's scheduler and a decode server's, a process each: what a load balancer would send to both of them
is fed to the decode side, which hands it on.

Bootstrap server, queues, pools and NIXL, which moves the states over TCP on this machine, are the real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mtp_demo.server import free_port

from . import harness, ranks
from .child import child_main
from .feeder import Feeder, PlainTokenizer, Receiver
from .recorder import Recorder, slot_of
from .scenario import Scenario
from .spec import EngineSpec, Result
from .states import Record, as_prefix, read_state

HOST = "127.0.0.1"
LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "SGLANG_HOST_IP": HOST, "HOST_IP": HOST}
"""NIXL's transport, and where SGLang says that a server can be reached."""

FROM_A_GPU = {"UCX_TLS": "tcp,self,cuda_copy"}
"""The same transport with what brings a GPU's memory to it and back."""

IDLE = 0.005
"""Seconds between two turns of an event loop that waits for the other process, which needs the time."""


GRACE = 60.0
"""Seconds that the two may end apart: one of them writes down far more than the other."""


class AllDone(Exception):
    """Ends an event loop; that of 0.5.17 knows no other end."""


class DecodeFeeder(Feeder):
    """Feeds the decode side, and through ``wire`` the prefill side with the same."""

    def __init__(self, wire: Connection, port: int, *args: Any) -> None:
        self._wire, self._port, self._rooms = wire, port, itertools.count(1)
        super().__init__(*args)
        wire.recv()  # the prefill side is there

    def recv_requests(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        forwards = self.scheduler.forward_ct
        messages = super().recv_requests(local_reqs)
        if self.scheduler.gracefully_exit:
            self._wire.send(None)
            raise AllDone
        if not messages and forwards == getattr(self, "_seen", None):
            time.sleep(IDLE)
        self._seen = forwards
        return messages

    def _message(self, request: Any) -> Any:
        message = super()._message(request)
        message.bootstrap_host, message.bootstrap_port = HOST, self._port
        message.bootstrap_room = next(self._rooms)
        self._wire.send(message)
        return message

    def _aborts(self) -> list[Any]:
        messages = super()._aborts()
        for message in messages:
            self._wire.send(message)
        return messages


class PrefillFeeder(Receiver):
    """Hands the prefill side's scheduler what comes through ``wire``. It has no outcomes of its own."""

    def __init__(self, wire: Connection, scheduler: Any) -> None:
        from .grammar import CountingBackend

        super().__init__()
        self._wire, self._scheduler, self._asked_all = wire, scheduler, False
        scheduler.tokenizer = PlainTokenizer()
        scheduler.request_receiver = self
        scheduler.grammar_manager.grammar_backend = CountingBackend(end=min(scheduler.model_config.hf_eos_token_id))
        channels = scheduler.ipc_channels
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            sender.send_output = lambda output, *_: None
        wire.send("ready")

    def recv_requests(self, local_reqs: Sequence[Any] = ()) -> list[Any]:
        self.step += 1
        messages: list[Any] = []
        if self._asked_all:
            if self._scheduler.is_fully_idle():
                raise AllDone
            time.sleep(IDLE)
            return [*local_reqs]
        wait = 20 * IDLE if self._scheduler.is_fully_idle() else IDLE
        while self._wire.poll(0 if messages else wait):
            message = self._wire.recv()
            if message is None:
                self._asked_all = True
                break
            messages.append(message)
        return [*local_reqs, *messages]


class DecodeRecorder(Recorder):
    """Records the states that arrive as well (kind "arrived"), under the prompts that they are states of."""

    def __init__(self, scheduler: Any, *, live: bool) -> None:
        super().__init__(scheduler, live=live)
        queue = scheduler.disagg_decode_transfer_queue
        commit = queue._commit_transfer_to_req

        def wrapped(decode_req: Any) -> Any:
            out = commit(decode_req)
            req = decode_req.req
            if len(req.output_ids) == 1:  # not one that was given up meanwhile
                slot = slot_of(req).reshape(1)
                (state,) = read_state(self.pool, slot, settle=True)
                self.records.append(Record("arrived", f"slot {int(slot)}", as_prefix(req.origin_input_ids), state))
            return out

        queue._commit_transfer_to_req = wrapped


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two, in its own process: what `child.run_here` does differently for it."""

    wire: Connection
    port: int
    decodes: bool

    def before(self) -> None:
        """A prefill server begins with the bootstrap server, which its scheduler registers with."""
        if not self.decodes:
            from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

            get_kv_class(TransferBackend.NIXL, KVClassType.BOOTSTRAP_SERVER)(host=HOST, port=self.port)

    def feeder(self, scheduler: Any, *args: Any) -> Any:
        return (
            DecodeFeeder(self.wire, self.port, scheduler, *args)
            if self.decodes
            else PrefillFeeder(self.wire, scheduler)
        )

    def recorder(self, scheduler: Any, *, live: bool) -> Recorder:
        return (DecodeRecorder if self.decodes else Recorder)(scheduler, live=live)

    def run(self, loop: Callable[[], None]) -> None:
        with contextlib.suppress(AllDone):
            loop()


def run_pair(prefill: EngineSpec, decode: EngineSpec, scenarios: Sequence[Scenario]) -> tuple[Result, Result]:
    """Run the scenarios on the two; what either showed, the prefill side first. Outcomes are the decode side's."""
    on_cpu = decode.device == "cpu"
    if on_cpu:
        harness.import_sglang()
    transport = LOOPBACK if on_cpu else LOOPBACK | FROM_A_GPU
    context, port = multiprocessing.get_context("fork" if on_cpu else "spawn"), free_port()
    ends = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="pair-") as folder:
        parts, processes, specs = [], [], []
        for spec, wire, role in zip((prefill, decode), ends, ("prefill", "decode"), strict=True):
            parts.append(Path(folder, role, "rank0"))
            parts[-1].parent.mkdir()
            extra = {
                "host": HOST,
                "disaggregation_mode": role,
                "disaggregation_transfer_backend": "nixl",
                "disaggregation_bootstrap_port": port,
            }
            specs.append(dataclasses.replace(spec, env=spec.env | transport, extra=spec.extra | extra))
            side = Side(wire, port, role == "decode")
            where = (f"{parts[-1]}.result", f"{parts[-1]}.log", 0, side)
            processes.append(context.Process(target=child_main, args=(specs[-1], list(scenarios), *where), daemon=True))
        for process in processes:
            process.start()
        late = ranks.wait(processes, decode.timeout, GRACE)
        why = [
            text or f"the process died, exit code {each.exitcode}" for text, each in zip(late, processes, strict=True)
        ]
        found = [harness.read_result(*each) for each in zip(specs, parts, why, strict=True)]
    if texts := [each for each in found if isinstance(each, str)]:
        raise harness.EngineError("\n".join(texts))
    for result in found:
        harness.note(result.spec, result)
    return found[0], found[1]
