"""The process that holds one real in-process Scheduler. Everything here runs after the fork (or spawn)."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from . import cuda_ops, foresight, launches, ranks, sabotage, sampling, sleep, traced
from .feeder import Feeder
from .recorder import Recorder
from .scenario import Scenario
from .spec import EngineSpec, Result

OFTEN_IMPORTED = ("sglang.", "transformers.models.")
"""How modules are called that most engines need; ours are not among them, so that every engine shows that it finds
those it needs."""


class Alone:
    """How an engine is fed, watched and run. `pair.Side` does it for one of two engines."""

    def before(self) -> None:
        """Nothing: SGLang's scheduler needs nobody."""

    def feeder(self, *args: Any) -> Feeder:
        return Feeder(*args)

    def recorder(self, scheduler: Any, *, live: bool) -> Recorder:
        return Recorder(scheduler, live=live)

    def run(self, loop: Callable[[], None]) -> None:
        loop()


def child_main(
    spec: EngineSpec, scenarios: Sequence[Scenario], out_path: str, log_path: str, rank: int = 0, side: Any = None
) -> None:
    """Process entry: run, then leave a pickled :class:`Result` or an exception text in ``out_path``.

    The processes of an engine's ranks meet in a file beside ``out_path``. ``side`` is None for an engine of its own.
    """
    prepare_environment(spec)
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    own_streams(log_path)
    tempfile.tempdir = os.path.dirname(out_path)  # SGLang leaves the names of its sockets behind
    try:
        ranks.meet_beside(out_path)
        payload: Any = run_here(spec, scenarios, rank, side or Alone())
    except BaseException:
        payload = traceback.format_exc()
        print(payload, file=sys.stderr)
    with open(out_path + ".part", "wb") as out:
        pickle.dump(payload, out, protocol=5)
    os.replace(out_path + ".part", out_path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # SGLang leaves daemon threads and sockets behind


def prepare_environment(spec: EngineSpec) -> None:
    """What the engine's process needs in its environment: some of it is read as SGLang is imported."""
    os.environ["SGLANG_MAMBA_MTP_MODE"] = spec.mode
    if spec.device != "cpu":
        os.environ.update(cuda_ops.environment(spec.dtype))
    os.environ.update(spec.env)


def own_streams(log_path: str) -> None:
    """Send what this process prints to the end of a file."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # pytest's capture leaves objects here that write somewhere else than to descriptors 1 and 2
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def run_here(spec: EngineSpec, scenarios: Sequence[Scenario], rank: int, side: Any) -> Result:
    """Build the scheduler, run its own event loop over the scenarios, and collect what it did."""
    started = time.perf_counter()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if spec.device != "cpu":
        cuda_ops.install()
    traced.watch()
    if spec.sabotaged_rank in (None, rank):
        sabotage.apply(spec.sabotage)
    foresight.apply(spec.foreseen)
    if spec.seeded:
        sampling.seed_requests()
    saver = sleep.MemorySaver()
    if spec.device == "cpu" and spec.extra.get("enable_memory_saver"):
        saver.install()
    compiled = launches.watch(spec.device) if spec.count_compiled else launches.Launches()
    side.before()
    there = set(sys.modules)
    scheduler = build_scheduler(spec, rank)
    imported = [name for name in sys.modules if name not in there and name.startswith(OFTEN_IMPORTED)]
    at_start = list(compiled.seen)
    if scheduler.enable_overlap != spec.overlap:
        raise AssertionError(f"overlap scheduling is {scheduler.enable_overlap} where {spec.overlap} was asked for")
    scheduler.idle_sleeper = None  # it waits at a socket, and the feeder brings requests by another way
    if spec.retract_every is not None:
        force_retractions(spec.retract_every)
    hooks = verify_hooks(spec, scheduler)
    free = free_counts(scheduler)
    agreement = ranks.agreement(spec, scheduler)
    feeder = side.feeder(scheduler, ranks.share(spec, scenarios, rank), spec.max_steps, agreement)
    recorder = side.recorder(scheduler, live=spec.record_live)
    built = time.perf_counter()
    side.run(scheduler.run_event_loop)
    recorder.close()
    check_nothing_is_lost(scheduler, free)
    pool = recorder.pool
    return Result(
        spec=spec,
        outcomes=feeder.outcomes,
        records=recorder.records,
        gaps=recorder.gaps,
        memory=feeder.memory.in_use,
        holders=feeder.memory.holders(),
        paused=feeder.paused,
        insertions=recorder.insertions,
        steps=feeder.step,
        forwards=scheduler.forward_ct,
        pool=f"{type(pool).__module__}.{type(pool).__qualname__}",
        draft_state_bytes=draft_state_bytes(pool),
        pool_bytes=allocated_bytes(tensors_behind(pool)),
        slot_bytes=allocated_bytes([pool.mamba_cache.temporal, *pool.mamba_cache.conv]),
        hooks=hooks,
        imported=imported,
        compiled=at_start,
        compiled_late=[launch for launch in compiled.seen if launch not in at_start],
        released_bytes=feeder.released_bytes,
        kept=saver.kept(tensors_behind(pool)),
        graphs=recorder.graphs,
        traced=traced.functions(),
        ended_as_tails=recorder.ended_as_tails,
        to_host=recorder.host.to_host,
        from_host=recorder.host.from_host,
        seconds_to_build=built - started,
        seconds_to_run=time.perf_counter() - built,
        shards=ranks.shards_of(scheduler),
    )


def build_scheduler(spec: EngineSpec, rank: int = 0) -> Any:
    """A Scheduler the way ``run_scheduler_process`` makes one, in either SGLang version."""
    import inspect

    from sglang.srt.managers.scheduler import Scheduler, configure_logger
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    server_args = ServerArgs(**spec.server_args())
    replica = rank if spec.data_parallel else None
    if "gpu_id" in inspect.signature(Scheduler.__init__).parameters:  # 0.5.17
        port_args = PortArgs.init_new(server_args)
        configure_logger(server_args)
        publish(server_args, role="scheduler")
        return Scheduler(server_args, port_args, rank, rank, 0, 0, 0, 0, replica)
    from sglang.srt.runtime_context import SpawnRanks

    server_args.resolve_once()
    port_args = PortArgs.init_new(server_args)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=replica, gpu_id=rank))
    configure_logger(server_args)
    return Scheduler(server_args, port_args)


def force_retractions(interval: int) -> None:
    """Turn on SGLang's own test switch; it reads its environment at import, which happened before the fork."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, interval


def free_counts(scheduler: Any) -> dict[str, int]:
    """How many of each kind of thing a request needs are free."""
    rows = scheduler.req_to_token_pool
    return {
        "KV tokens": scheduler.token_to_kv_pool_allocator.available_size(),
        "state slots": rows.mamba_allocator.available_size(),
        "request rows": rows.available_size(),
    }


def check_nothing_is_lost(scheduler: Any, before: dict[str, int]) -> None:
    """Evict all that an idle scheduler has cached, node by node; raise AssertionError unless all is free that was."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    scheduler.tree_cache.evict(EvictParams(num_tokens=sys.maxsize, mamba_num=sys.maxsize))
    after = free_counts(scheduler)
    if after != before:
        raise AssertionError(f"free before any request: {before}; after all of them: {after}")


def draft_state_bytes(pool: Any) -> int:
    """Bytes of SGLang's per-draft-node copies: ``intermediate_ssm`` and ``intermediate_conv_window``."""
    cache = pool.mamba_cache
    ssm, windows = getattr(cache, "intermediate_ssm", None), getattr(cache, "intermediate_conv_window", None)
    tensors = [ssm] if ssm is not None else []
    tensors += windows if isinstance(windows, list) else [windows] if windows is not None else []
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def tensors_behind(pool: Any) -> list[Any]:
    """Every tensor a pool holds, in its own attributes and those of the records and plugin objects it holds."""
    import torch

    found, seen, todo = [], set(), [pool]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, (list, tuple)):
            todo += thing
        elif type(thing).__module__.startswith(("sglang_mamba_mtp.", "sglang.srt.mem_cache.")):
            todo += vars(thing).values()
    return found


def allocated_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the distinct storages behind the tensors, as allocated."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def verify_hooks(spec: EngineSpec, scheduler: Any) -> list[str]:
    """The surfaces whose hooks are live.

    Raises AssertionError unless the engine is what the spec says: ours where it speculates in a mode other than "off",
    SGLang's own everywhere else. A test of an engine that quietly runs stock code would prove nothing.
    """
    from sglang_mamba_mtp.hooks import registry, table

    registry.prove()
    linear = scheduler.tp_worker.model_runner.attn_backend.linear_attn_backend
    ours = type(linear).__module__.startswith("sglang_mamba_mtp.")
    verifies = spec.spec is not None and spec.extra.get("disaggregation_mode") != "prefill"
    wanted = spec.mode != "off" and verifies
    if ours != wanted:
        raise AssertionError(
            f"mode {spec.mode}, speculation {spec.spec}: the linear-attention backend is {type(linear).__module__}."
            f"{type(linear).__qualname__}, expected {'the plugin' if wanted else 'SGLang'}'s own"
        )
    return [hook.surface for hook in table.active(spec.mode)]
