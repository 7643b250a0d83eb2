"""Faults put into an engine on purpose, to show that the comparisons see them. Applied after the plugin's hooks."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import os
import time

POISON = 126
"""A token that `poison` turns into NaN and `scramble` marks requests by, the last ordinary one of the tests' models.
Nobody says or drafts it."""


def apply(name: str | None) -> None:
    """Put the named fault in place; ``None`` does nothing."""
    if name is not None:
        FAULTS[name]()


def _wrap_commit(change):
    """Let ``change(last_correct, steps_to_track)`` rewrite what the commit is told."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    commit = HybridLinearAttnBackend.update_mamba_state_after_mtp_verify

    @functools.wraps(commit)
    def wrapped(self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, *args, **kwargs):
        last, steps = change(last_correct_step_indices, mamba_steps_to_track)
        return commit(self, last, mamba_track_indices, steps, *args, **kwargs)

    HybridLinearAttnBackend.update_mamba_state_after_mtp_verify = wrapped


def _commit_root():
    """The commit takes the root's state instead of the last accepted node's."""
    _wrap_commit(lambda last, steps: (last.new_zeros(last.shape), steps))


def _commit_one_less():
    """The commit takes the node before the last accepted one in verify order (the parent, in a chain)."""
    _wrap_commit(lambda last, steps: ((last - 1).clamp(min=0), steps))


def _track_root():
    """The snapshot for the radix cache is taken at the root instead of the boundary node."""
    _wrap_commit(lambda last, steps: (last, None if steps is None else steps.clamp(max=0)))


def _skip_settle():
    """Nobody brings a slot up to date before another reads it (the plugin's own modes)."""
    from sglang_mamba_mtp.state.pools import MtpMambaPool

    MtpMambaPool.settle = lambda self, slots: None


def _skip_renew():
    """The pool's memory comes back from sleep as it is (the plugin's own modes)."""
    from sglang_mamba_mtp.state.pools import MtpMambaPool

    MtpMambaPool.renew = lambda self: None


def _old_decay():
    """Folds decay by the weights that the engine began with (Mamba2, replay)."""
    from sglang_mamba_mtp.families.mamba2 import Mamba2Family

    make = Mamba2Family.fold

    def as_now(model):
        import torch
        from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

        mixers = torch.nn.ModuleList()
        for mixer in (module for module in model.modules() if isinstance(module, MambaMixer2)):
            mixers.append(MambaMixer2.__new__(MambaMixer2))
            torch.nn.Module.__init__(mixers[-1])
            mixers[-1].A = torch.nn.Parameter(mixer.A.detach().clone(), requires_grad=False)
        return mixers

    @functools.wraps(make)
    def wrapped(self, device, model):
        made = []

        def fold(*args, **kwargs):
            if not made:  # not as the store is made, in memory that a sleep gives back
                made.append(make(self, device, as_now(model)))
            made[0](*args, **kwargs)

        return fold

    Mamba2Family.fold = wrapped


def _skip_discard():
    """What is known about a recycled or overwritten slot outlives its former owner (the plugin's own modes)."""
    from sglang_mamba_mtp.state.pools import MtpMambaPool

    MtpMambaPool.overwritten_by_sglang = lambda self, slots: None


def _skip_leaving():
    """Slots are copied to the host as they lie (the plugin's own modes)."""
    from sglang_mamba_mtp.state.pools import MtpMambaPool

    MtpMambaPool.leave_for_host = lambda self, slots: None


def _skip_arriving():
    """What is known about a slot outlives what comes into it from the host (the plugin's own modes)."""
    from sglang_mamba_mtp.state.pools import MtpMambaPool

    MtpMambaPool.arrive_from_host = lambda self, slots: None


def _seldom_loads():
    """No fault: two of three times there is no room on the device for what the host has."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    load, times = HybridCacheController.load, itertools.count()

    @functools.wraps(load)
    def wrapped(self, *args, **kwargs):
        return None if next(times) % 3 else load(self, *args, **kwargs)

    HybridCacheController.load = wrapped


def _slow_host():
    """No fault: a copy to the host is there after the scheduler has looked for it 60 times."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    count, looks = UnifiedRadixCache._count_ready_acks, collections.Counter()

    @functools.wraps(count)
    def wrapped(self, queue):
        if queue is not self.cache_controller.ack_write_queue:
            return count(self, queue)
        looks.update(id(ack) for ack in queue)
        return min(count(self, queue), sum(looks[id(ack)] > 60 for ack in queue))

    UnifiedRadixCache._count_ready_acks = wrapped


def _starts_from_anything():
    """What could not be loaded is not made up for, as in SGLang; and there is seldom room for it."""
    from sglang_mamba_mtp.hooks import host_tier

    host_tier._start_from_the_devices_hit = lambda cache, req: None
    _seldom_loads()


def _stale_layout():
    """A state moves and its layout bit stays behind."""
    from sglang_mamba_mtp.state.axis_order import AxisOrders

    AxisOrders.move = lambda self, src_slots, dst_slots: None


def _unturned():
    """SGLang's kernels are handed slots in the other layout."""
    from sglang_mamba_mtp.state.axis_order import AxisOrders

    AxisOrders.turn = lambda self, slots, layout: None


def _unhook_commit():
    """The plugin's commit hook is taken off again: stock code would serve."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    commit = HybridLinearAttnBackend.update_mamba_state_after_mtp_verify
    HybridLinearAttnBackend.update_mamba_state_after_mtp_verify = inspect.unwrap(commit)


def _uncounted_tail():
    """A request that ends as a tail of a prefill is cached without its last token, as SGLang does."""
    from sglang_mamba_mtp.compat import batches

    batches.tails_of = lambda batch: []


def _reasons():
    """No fault: every request counts as one that reasoned, as SGLang's reasoning parser leaves it."""
    from sglang.srt.managers.schedule_batch import Req

    begin = Req.__init__

    @functools.wraps(begin)
    def wrapped(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.reasoning_tokens = 1

    Req.__init__ = wrapped


def _mute():
    """No fault: neither the model nor its drafter chooses the token POISON."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    forward = LogitsProcessor.forward

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.next_token_logits[:, POISON] = float("-inf")
        return output

    LogitsProcessor.forward = wrapped


def _poison():
    """The embedding of the token POISON is not a number."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    _mute()
    embed = VocabParallelEmbedding.forward

    @functools.wraps(embed)
    def wrapped(self, input_):
        return embed(self, input_).masked_fill((input_ == POISON).unsqueeze(-1), float("nan"))

    VocabParallelEmbedding.forward = wrapped


def _scramble():
    """Requests with POISON in their prompts have drafts whose links are any numbers: no tree, and mostly not in it."""
    import torch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_mamba_mtp.state.store import DraftStore

    _mute()
    run_batch, prepare, marked = Scheduler.run_batch, DraftStore.prepare, set()
    generator = torch.Generator().manual_seed(0)

    @functools.wraps(run_batch)
    def noting(self, batch, *args, **kwargs):
        for req, row in zip(batch.reqs, batch.req_pool_indices.tolist(), strict=True):
            (marked.add if POISON in req.origin_input_ids else marked.discard)(row)
        return run_batch(self, batch, *args, **kwargs)

    def scrambled(links, rows):
        nodes = links.shape[1]
        any_numbers = torch.randint(-nodes, 2 * nodes, links.shape, dtype=links.dtype, generator=generator)
        far = torch.randint(-(2**31), 2**31, links.shape, generator=generator).to(links.dtype)
        any_numbers = torch.where(torch.rand(links.shape, generator=generator) < 0.1, far, any_numbers)
        return torch.where(rows[:, None], any_numbers, links)

    @functools.wraps(prepare)
    def garbled(self, batch, next_token, next_sibling):
        rows = torch.tensor([row in marked for row in batch.rows.tolist()])
        if batch.chain:  # a dummy run of SGLang's, which brings no links
            return prepare(self, batch, next_token, next_sibling)
        return prepare(self, batch, scrambled(next_token, rows), scrambled(next_sibling, rows))

    Scheduler.run_batch, DraftStore.prepare = noting, garbled


def _no_wait():
    """No fault: CUDA raises where our GDN backend waits for the device while it prepares a forward."""
    import torch

    from sglang_mamba_mtp.backends.gdn import GdnBackend

    prepare = GdnBackend.init_forward_metadata

    def wrapped(self, forward_batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            prepare(self, forward_batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if self.forward_metadata.num_state_checkpoints:
            print("a prefill has planned its checkpoints", flush=True)

    GdnBackend.init_forward_metadata = wrapped


def _die():
    """The process ends without a word."""
    print("last words", flush=True)
    os._exit(3)


def _hang():
    """The process never gets anywhere."""
    time.sleep(3600)


FAULTS = {
    "commit_root": _commit_root,
    "commit_one_less": _commit_one_less,
    "track_root": _track_root,
    "skip_settle": _skip_settle,
    "skip_discard": _skip_discard,
    "skip_leaving": _skip_leaving,
    "skip_arriving": _skip_arriving,
    "seldom_loads": _seldom_loads,
    "slow_host": _slow_host,
    "starts_from_anything": _starts_from_anything,
    "skip_renew": _skip_renew,
    "old_decay": _old_decay,
    "stale_layout": _stale_layout,
    "unturned": _unturned,
    "unhook_commit": _unhook_commit,
    "uncounted_tail": _uncounted_tail,
    "reasons": _reasons,
    "mute": _mute,
    "poison": _poison,
    "scramble": _scramble,
    "no_wait": _no_wait,
    "die": _die,
    "hang": _hang,
}
