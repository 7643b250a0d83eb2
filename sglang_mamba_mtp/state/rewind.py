"""The radix strategy that replay makes possible: one state slot for a running request, none for snapshots.

SGLang reserves two more slots for every running request, in which its state is tracked at intervals, because a state
that has run past a key cannot be cut back to it. A lagging checkpoint can. So while it decodes nothing is tracked, and
a request that ends gives its own slot to the radix cache, brought back to exactly its key's length
(`Window.state_at`), which is a number of whole pages.
A prefill still takes the snapshots that make shared prefixes hit, into one slot, which the radix cache owns as soon as
the prefill's result is processed.

SGLang sees its strategy ``extra_buffer``, with one snapshot slot a request and none between prefills.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from ..compat import batches, startup
from ..errors import MtpError
from .pools import RewindPool
from .window import threshold_to_rewind

#: State slots for every running request: its own, and one for what the radix cache keeps of it.
SLOTS_PER_REQUEST = 2
#: With HiCache, where what the radix cache keeps stays until it has been copied to the host, and the next request has
#: begun by then, with a slot for its prefill's snapshot.
SLOTS_PER_REQUEST_WITH_HOST = 3


def slots_per_request(server_args: Any) -> int:
    """State slots for every running request."""
    return SLOTS_PER_REQUEST_WITH_HOST if startup.resolved(server_args).enable_hierarchical_cache else SLOTS_PER_REQUEST


def why_not(server_args: Any, longest_window: int) -> str | None:
    """What requests' states cannot be rewound with, as the operator spells it; None where they can.

    ``longest_window`` is the most tokens that a verify of the model's family can replay.
    """
    args = startup.resolved(server_args)
    if args.disaggregation_mode not in (None, "null"):
        return f"--disaggregation-mode {args.disaggregation_mode}"
    if args.disable_radix_cache:
        return "--disable-radix-cache"
    if not startup.chooses_radix_strategy(server_args):
        return f"--mamba-radix-cache-strategy {args.mamba_radix_cache_strategy}"
    if args.mamba_radix_cache_strategy != "extra_buffer":
        if args.linear_attn_backend != "triton":
            return f"--linear-attn-backend {args.linear_attn_backend}, with which SGLang takes no snapshots"
        return "--disable-overlap-schedule, where SGLang gives requests' own slots away itself"
    page = startup.page_size(server_args)
    if page > 1 and threshold_to_rewind(startup.draft_lengths(server_args)[-1], page) > longest_window:
        return f"--page-size {page}, whose boundaries may lie further back than a window"
    if args.enable_mixed_chunk:
        return "--enable-mixed-chunk, which decodes outside a verify"
    return None


class RewindRequests(HybridReqToTokenPool):
    """SGLang's request pool, whose requests hold their own slot and, during a prefill, one for its snapshot."""

    mamba_pool_cls = RewindPool
    _offered: int | None = None

    def __init__(self, *, enable_overlap_schedule: bool = True, **kwargs: Any) -> None:
        # Without overlap SGLang's requests have one snapshot slot. That is what prefills need here.
        super().__init__(enable_overlap_schedule=False, **kwargs)

    def _alloc_ping_pong_buffer(self, req: Any) -> None:
        """A slot for the snapshot of ``req``'s prefill, if there is one left: without it nothing is cached of the
        prefill, which costs time and nothing else."""
        if self.mamba_allocator.available_size() > 0:
            super()._alloc_ping_pong_buffer(req)
            req._mamba_mtp_snapshot = batches.tracking_of(req).mamba_ping_pong_track_buffer.clone()
            return
        tracking = batches.tracking_of(req)
        tracking.mamba_ping_pong_track_buffer = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        tracking.mamba_next_track_idx = 0

    @staticmethod
    def snapshot_of(req: Any) -> torch.Tensor | None:
        """The slot [1] that ``req`` holds for its prefill's snapshot."""
        return getattr(req, "_mamba_mtp_snapshot", None)

    def _let_go_of_snapshot(self, req: Any) -> None:
        req._mamba_mtp_snapshot = None
        row = batches.request_row(req)
        if row is not None:
            self.req_index_to_mamba_ping_pong_track_buffer_mapping[row].fill_(-1)
        batches.let_go_of_snapshot(req)

    def give_snapshot(self, req: Any) -> tuple[torch.Tensor | None, int]:
        """The slot [1] with ``req``'s prefill snapshot, which is the caller's from now on, and of how many tokens it
        is; None and 0 if none was taken. ``req`` holds no snapshot slot afterwards."""
        slot, length = self.snapshot_of(req), batches.tracking_of(req).mamba_last_track_seqlen
        self._let_go_of_snapshot(req)
        if slot is not None and length is None:
            self.mamba_allocator.free(slot)
        return (slot, length) if slot is not None and length is not None else (None, 0)

    def note_prefill(self, req: Any) -> None:
        """``req`` is about to be prefilled, which leaves nothing pending."""
        req._mamba_mtp_prefilled = len(req.get_fill_ids())

    def length_within_reach(self, req: Any, length: int) -> int:
        """The most whole pages of the first ``length`` tokens that the own slot of ``req``, which has ended, can be
        brought back to, in tokens; 0: none.

        Its newest step can be taken back always, and to the page boundary before that as far as its prefill did not
        pass it. A key that ends before the newest step (``--strip-thinking-cache``) may lie before the checkpoint.
        """
        if batches.lengths_of(req).kv_committed_len - length > self.mamba_pool.max_nodes:
            return 0
        length -= length % self.mamba_pool.page
        return length if length >= req._mamba_mtp_prefilled else 0

    def offer(self, req: Any, length: int) -> torch.Tensor:
        """The own slot [1] of ``req``, which has ended, as the state after ``length`` tokens: that is what it holds
        before anybody reads it. Some versions copy it to the host before they say that they keep it."""
        slot, self._offered = batches.request_slot(req), length
        self.mamba_pool.give_away(slot, length)
        return slot.reshape(1).clone()

    def release(self, req: Any, *, given: int | None) -> None:
        """``req`` has ended. ``given``: of how many tokens the radix cache has taken its own slot as the state; None:
        it has not taken it.

        Raises
            MtpError: it was offered as the state after another number of tokens.
        """
        slot, snapshot = batches.request_slot(req), self.snapshot_of(req)
        self._hide_slot(req)
        if given is None:
            self.mamba_allocator.free(slot.reshape(1))
        elif given != self._offered:
            raise MtpError(f"the radix cache keys a state of {self._offered} tokens by {given} tokens")
        if snapshot is not None:
            self.mamba_allocator.free(snapshot)
        self._let_go_of_snapshot(req)
        batches.let_go_of_slot(req)

    def _hide_slot(self, req: Any) -> None:
        """A verify with ``req`` in it may be planned and yet to be launched: beside a grammar, NGRAM's results are seen
        before the next verify begins. It is not to find the slot, whose next owner would get the tokens it commits.
        """
        row = batches.request_row(req)
        if row is not None:
            self.req_index_to_mamba_index_mapping[row].fill_(-1)

    def free_mamba_cache(self, req: Any, mamba_ping_pong_track_buffer_to_keep: int | None = None) -> None:
        self.release(req, given=None)

    def may_load(self, evictable: int) -> bool:
        """Whether a state may come back from the host for the radix cache, of which ``evictable`` slots can be had: not
        where a request that may still begin would go without one."""
        there = self.mamba_allocator.available_size() + evictable
        return there > SLOTS_PER_REQUEST * self.available_size()

    def clear(self) -> None:
        super().clear()
        self.mamba_pool.queue.forget()
