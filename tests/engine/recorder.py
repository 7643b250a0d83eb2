"""Watches a scheduler run and records the mamba states it leaves in its slots, each under its token prefix.

Four places are watched from outside, none of them hooked by the plugin: ``run_batch`` (states right after a forward
and its commit, in stream order), ``process_batch_result`` (which tokens those were), the radix cache's ``insert``
and the slot allocator's ``free`` (which slots the cache owns, and under which key). What the cache has copied to the
host and back is watched by `host.HostWatch`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .host import HostWatch
from .states import Prefix, Record, State, as_prefix, name_of, read_given, read_int8, read_state


def slot_of(req: Any) -> torch.Tensor | None:
    """The request's own state slot, a scalar tensor (it moved to ``req.kv`` between SGLang 0.5.17 and 0.5.23)."""
    if hasattr(type(req), "mamba_pool_idx") or "mamba_pool_idx" in vars(req):
        return req.mamba_pool_idx
    return req.kv.mamba_pool_idx if req.kv is not None else None


def _tails(batch: Any) -> list[Any]:
    """The running requests that a mixed batch decodes, one token each, behind its prefills."""
    return list(getattr(batch, "decoding_reqs", None) or ())


class Recorder:
    """Collects :class:`~.states.Record` objects. ``live`` switches the per-step states of running requests."""

    def __init__(self, scheduler: Any, *, live: bool):
        self.scheduler = scheduler
        self.pool = scheduler.req_to_token_pool.mamba_pool
        self.records: list[Record] = []
        self.gaps: dict[bytes, float] = {}
        self._plain = scheduler.spec_algorithm.is_none() and not scheduler.enable_overlap
        self.live = live
        self.step = 0
        self.graphs = 0
        self.ended_as_tails = 0
        self.insertions = 0
        self._caching = ""
        self.owned: dict[int, Prefix] = {}
        self._given: dict[int, str] = {}
        self.inserting: dict[int, Prefix] = {}  # never changed, but replaced
        self._inserted: list[tuple[torch.Tensor, str, Prefix]] = []
        self._in_flight: dict[int, list[tuple[int, Any, bytes | None, Any]]] = {}
        scheduler.run_batch = self._wrap_run_batch(scheduler.run_batch)
        scheduler.process_batch_result = self._wrap_process(scheduler.process_batch_result)
        tree = scheduler.tree_cache
        tree.insert = self._wrap_insert(tree.insert)
        for name in ("cache_finished_req", "cache_unfinished_req", "checkpoint"):  # 0.5.23 has the last one only
            if hasattr(tree, name):
                setattr(tree, name, self._wrap_cache(name, getattr(tree, name)))
        self._int8 = scheduler.req_to_token_pool.mamba_ckpt_pool
        allocator = self._int8.allocator if self._int8 else scheduler.req_to_token_pool.mamba_allocator
        allocator.free = self._wrap_free(allocator.free)
        allocator.clear = self._wrap_clear(allocator.clear)
        self.host = HostWatch(scheduler, self)

    # -- running requests ----------------------------------------------------------------------------------------

    def _wrap_run_batch(self, run_batch):
        def wrapped(batch, *args, **kwargs):
            extend = batch.forward_mode.is_extend()
            result = run_batch(batch, *args, **kwargs)
            self.step += 1
            self.graphs += bool(getattr(result, "can_run_cuda_graph", False))
            if self._plain:
                self._note_gaps(batch, result)
            # Overlapped, a request may have ended and given up its slot after this batch was planned.
            rows = [(row, req, slot_of(req)) for row, req in enumerate(batch.reqs)]
            rows = [entry for entry in rows if entry[2] is not None]
            if self.live and rows:
                # Without overlap a forward runs on the scheduler's own stream, which is current here.
                overlap = self.scheduler.enable_overlap
                with self.scheduler.forward_stream_ctx if overlap else contextlib.nullcontext():
                    states = read_state(self.pool, torch.stack([slot.reshape(()) for *_, slot in rows]), settle=True)
                # a prefill's tokens are known now; a decode's once its result is read, in a mixed batch too
                tails = _tails(batch)
                keys = [as_prefix(req.get_fill_ids()) if extend and req not in tails else None for _, req, _ in rows]
                self._in_flight[id(result)] = [
                    (row, req, key, state) for (row, req, _), key, state in zip(rows, keys, states, strict=True)
                ]
            return result

        return wrapped

    def _note_gaps(self, batch: Any, result: Any) -> None:
        """By how much the most likely next token of each row leads, under the tokens it follows."""
        best = result.logits_output.next_token_logits.float().topk(2, dim=-1).values
        extend = batch.forward_mode.is_extend()
        for req, gap in zip(batch.reqs, (best[:, 0] - best[:, 1]).tolist(), strict=True):
            tokens = req.get_fill_ids() if extend else [*req.origin_input_ids, *req.output_ids]
            self.gaps[name_of(tokens)] = gap

    def _wrap_process(self, process):
        def wrapped(batch, result, *args, **kwargs):
            entries = self._in_flight.pop(id(result), [])
            gone = [req.finished() or req.is_retracted for _, req, _, _ in entries]
            before = [[*req.origin_input_ids, *req.output_ids] for _, req, _, _ in entries]
            tails = [req for req in _tails(batch) if not req.finished()]
            out = process(batch, result, *args, **kwargs)
            self.ended_as_tails += sum(req.finished() for req in tails)
            for i, (row, req, key, state) in enumerate(entries):
                if gone[i]:  # an overlapped extra step of a request that had ended
                    continue
                kind = "decode" if key is None else "prefill"
                if key is None:
                    key = as_prefix(before[i] + self._committed_drafts(result, row))
                self.records.append(Record(kind, f"{req.rid}@{self.step}", key, state))
            return out

        return wrapped

    @staticmethod
    def _committed_drafts(result: Any, row: int) -> list[int]:
        """Tokens past the root that the row's state holds: the accepted run without its bonus token."""
        if getattr(result, "accept_lens", None) is None:
            return []
        stride, accepted = result.speculative_num_draft_tokens, int(result.accept_lens[row])
        return result.next_token_ids[row * stride : row * stride + accepted - 1].tolist()

    # -- slots the radix cache owns --------------------------------------------------------------------------------

    def _wrap_cache(self, what: str, cache):
        def wrapped(req, *args, **kwargs):
            self._caching = f"by {what} of {req.rid}"
            try:
                return cache(req, *args, **kwargs)
            finally:
                self._caching = ""
                self._read_inserted()

        return wrapped

    def _wrap_insert(self, insert):
        def wrapped(params):
            value = params.mamba_value
            if value is None:
                return insert(params)
            if getattr(params.key, "is_bigram", False):
                raise AssertionError("bigram keys on a mamba radix cache: the recorder cannot name their states")
            self.host.catch_up()
            slot, prefix = int(value.reshape(-1)[0]), as_prefix(params.key.raw_token_ids())
            self.inserting = {slot: prefix}
            result = insert(params)
            self.inserting = {}
            if result.mamba_exist or not prefix:
                return result
            self.owned[slot], self._given[slot] = prefix, self._caching
            self.insertions += 1
            self._inserted.append((value, f"slot {slot} {self._caching}@{self.step}", prefix))
            return result

        return wrapped

    def _read_inserted(self) -> None:
        """What the radix cache was given, once it is known in which state."""
        for slot, where, prefix in self._inserted:
            self.records.append(Record("insert", where, prefix, self._cached(slot)))
        self._inserted.clear()

    def _cached(self, slot: torch.Tensor) -> State:
        """What the radix cache has in ``slot``: one of the pool, or of SGLang's pool of int8 states."""
        return read_given(self.pool, slot) if self._int8 is None else read_int8(self._int8, slot)

    def own(self, slot: int, prefix: Prefix) -> None:
        """The radix cache owns ``slot`` from now on, as the state after ``prefix``."""
        self.owned[slot] = prefix
        self._given.pop(slot, None)

    def _wrap_free(self, free):
        def wrapped(slots):
            self.host.catch_up()
            for slot in slots.reshape(-1).tolist():
                self.owned.pop(slot, None)
            return free(slots)

        return wrapped

    def _wrap_clear(self, clear):
        def wrapped():
            self.host.catch_up()
            self.owned.clear()
            return clear()

        return wrapped

    def close(self) -> None:
        """Read what the radix cache owns now, and check that its own count of states agrees."""
        self.host.catch_up()
        tree = self.scheduler.tree_cache
        if tree.supports_mamba():
            counted = tree.mamba_evictable_size() + tree.mamba_protected_size()
            if counted != len(self.owned):
                raise AssertionError(f"the radix cache counts {counted} states, the recorder {len(self.owned)}")
        device = self.pool.mamba_cache.temporal.device
        if device.type == "cuda":  # an overlapped extra step may still run
            torch.cuda.synchronize(device)
        for slot, prefix in sorted(self.owned.items()):
            state = self._cached(torch.tensor([slot], device=device))
            self.records.append(Record("radix", f"slot {slot} {self._given.get(slot, '')} at the end", prefix, state))
