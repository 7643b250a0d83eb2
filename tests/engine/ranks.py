"""Engines of several tensor-parallel ranks: a process each, and one engine's result made of theirs.

Every rank's scheduler is fed by a feeder of its own. They stay in step because they decide alike, as SGLang's
schedulers do when rank 0 tells the others what has arrived: a rank that decided otherwise would wait for the others
for ever, or show other records.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .scenario import Scenario
from .spec import EngineSpec, Result
from .states import Record, Shards

IDLE_DRAFT_FAILS = (
    "SGLang's Nemotron-H draft fails on an idle rank, in mode off too, with experts at its end and without"
)
"""Why data-parallel attention of Mamba2 is left out, after 0.5.17."""

GRACE = 15.0
"""Seconds that ranks, which run in step, may end apart: what they have seen is written to disk meanwhile."""


def meet_beside(path: str) -> None:
    """Let this engine's ranks find each other by a file, which needs no free port."""
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{Path(path).with_name('ranks')}"


def wait(processes: Sequence[BaseProcess], timeout: float, grace: float = GRACE) -> list[str]:
    """Wait ``timeout`` seconds for all processes, and ``grace`` seconds for the rest once one of them has ended.

    Returns
        for every process why it was killed, or "" if it ended by itself.
    """
    until, why = time.monotonic() + timeout, f"no result within {timeout:.0f} s"
    while running := [process for process in processes if process.is_alive()]:
        if len(running) < len(processes) and until > time.monotonic() + grace:
            until, why = time.monotonic() + grace, f"no result {grace:.0f} s after another one's end"
        if not connection.wait([process.sentinel for process in running], max(0.0, until - time.monotonic())):
            break
    late = [why if process.is_alive() else "" for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return late


def shards_of(scheduler: Any) -> Shards:
    """How this scheduler's rank has its states cut."""
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    from sglang_mamba_mtp.compat import startup
    from sglang_mamba_mtp.names import GDN

    runner = scheduler.tp_worker.model_runner
    shape = startup.cache_params(runner.model_config).shape
    heads, rows, _ = shape.temporal
    own, rest = heads * rows, shape.conv[0][0] - heads * rows
    if startup.linear_family(runner.model_config)[0] == GDN:
        return Shards((rest // 2, rest // 2, own), (False, False, False))
    mixers = [module for module in runner.model.modules() if isinstance(module, MambaMixer2)]
    repeated = mixers[0].norm.n_groups < mixers[0].tp_size
    return Shards((own, rest // 2, rest // 2), (False, repeated, repeated))


def share(spec: EngineSpec, scenarios: Sequence[Scenario], rank: int) -> Sequence[Scenario]:
    """What a rank is asked: everything, or every so-many-th scenario where ranks have requests of their own."""
    return scenarios[rank :: spec.ranks] if spec.data_parallel else scenarios


def agreement(spec: EngineSpec, scheduler: Any) -> Callable[[bool], bool]:
    """Tells a rank that asks whether all are done, so that they end in one step: a forward needs all of them.

    Ranks with the same requests decide alike and need not ask.
    """
    if not spec.data_parallel:
        return lambda done: done
    import torch
    from torch import distributed

    def all_done(done: bool) -> bool:
        votes = torch.tensor([int(done)])
        distributed.all_reduce(votes, distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
        return bool(votes.item())

    return all_done


def joined(results: Sequence[Result]) -> Result:
    """One result of an engine's ranks: their tokens, which must be the same, and their states put together; or, where
    each had requests of its own, the tokens and states of all.

    Bytes are the sum over ranks; what is counted in steps, and the log, is the first rank's.

    Raises AssertionError if ranks differ in what they did.
    """
    first, *others = results
    if not others:
        return first
    if first.spec.data_parallel:
        outcomes = {key: outcome for result in results for key, outcome in result.outcomes.items()}
        records = [record for result in results for record in result.records]
    else:
        _check_alike(first, others)
        outcomes = first.outcomes
        parts = zip(*(result.records for result in results), strict=True)
        records = [joined_record(first.shards, each) for each in parts]
    sizes = ("draft_state_bytes", "pool_bytes", "slot_bytes", "released_bytes")
    summed = {name: sum(getattr(result, name) for result in results) for name in sizes}
    return dataclasses.replace(first, outcomes=outcomes, records=records, **summed)


def _check_alike(first: Result, others: Sequence[Result]) -> None:
    for rank, other in enumerate(others, 1):
        for name in ("outcomes", "insertions", "steps", "forwards", "pool", "hooks", "graphs"):
            if getattr(other, name) != getattr(first, name):
                raise AssertionError(f"rank {rank} differs from rank 0 in {name}")


def joined_record(shards: Shards, parts: Sequence[Record]) -> Record:
    """One record of the ranks' of the same state."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.kind, part.where, part.prefix) != (first.kind, first.where, first.prefix):
            raise AssertionError(
                f"rank {rank} has {part.kind} {part.where} where rank 0 has {first.kind} {first.where}"
            )
    return dataclasses.replace(first, state=shards.joined([part.state for part in parts]))
