"""Slots mode's buffers: every draft node has a slot of its own, and a commit only says which of them holds the newest
state.

The pool has a region of draft slots behind its ordinary ones, N - 1 for each request row (N: the largest draft length).
Together with the request's own (*canonical*) slot they are the N places of a verify: place 0 is the canonical slot,
place j > 0 of row r is ``first + r * (N - 1) + j - 1``. A verify reads the newest state from its place p and writes the
convolution window and the recurrent state after node i to place ``(p + i) mod N``. So the root writes over the state it
was read from, and nodes never meet. Nothing is copied in a step, and the canonical slot holds some node's state until
somebody else is about to read it.

The state before a verify is gone once that has run. Nobody asks for it: a root is a token that the request has already
(the last step's bonus token), every commit accepts it, and only this verify continues from the state before. Where a
request turns out to have ended while its next verify runs, which takes overlap scheduling, the radix cache is given
snapshots, which lie in slots of their own, and the request's own slot goes to its next owner on the forward stream,
behind that verify and its commit. Without overlap nothing runs ahead. A row that accepted nothing would lose its state.

Bookkeeping, int32 on the pool's device (R request rows, S slots, without the draft slots)::

    current_input[R]  the draft slot the row's next verify reads; -1 for the canonical slot
    row_slot[R]       the canonical slot of the request that row last committed for
    slot_row[S]       the row that last committed for the slot

``current_input`` counts only while ``row_slot`` names the slot asked about: a row that has passed to another request
does not point that request, nor the former one's slot, to draft slots that are not theirs.

Axis order: a verify writes every slot as it lies. Draft slots lie as we write; a canonical slot as SGLang's prefill, or
the copy that settled it, has left it.

Source: draft slots as in TokenSpeed #159, here for trees and for Mamba2 too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from mamba_mtp_kernels.common.operands import NodeSlots, SlotBooks, States

from ..families.base import VerifyOp
from .axis_order import AxisOrders
from .store import DraftStore, Parts, VerifyBatch


def draft_slots(nodes: int) -> int:
    """Draft slots of a request row for drafts of up to ``nodes`` nodes: the root's is the one it is read from."""
    return max(0, nodes - 1)


class DraftSlots(DraftStore):
    """The draft slots of all request rows (see the module's text)."""

    def __init__(
        self,
        *,
        verify: VerifyOp,
        states: torch.Tensor,
        conv_states: torch.Tensor,
        axis_orders: AxisOrders,
        first: int,
        rows: int,
        nodes: int,
        max_batch: int,
    ) -> None:
        """``verify`` is the family's kernel; ``states`` [L, S, ...] and ``conv_states`` [L, S, dim, K-1] are the
        pool's, the draft slots from slot ``first`` on: those of ``rows`` request rows, for up to ``nodes`` draft nodes
        each."""
        super().__init__(verify=verify, states=states, conv_states=conv_states, nodes=nodes, max_batch=max_batch)
        per_row = draft_slots(nodes)
        if states.shape[1] != first + rows * per_row:
            raise ValueError(
                f"a pool of {states.shape[1]} slots has no room for {rows} x {per_row} draft slots from slot {first} on"
            )
        device = states.device
        self.first = first
        self._axis_orders = axis_orders
        self.current_input = torch.empty(rows, dtype=torch.int32, device=device)
        self.row_slot = torch.empty(rows, dtype=torch.int32, device=device)
        self.slot_row = torch.empty(first, dtype=torch.int32, device=device)
        self._books = SlotBooks(self.current_input, self.row_slot, self.slot_row, first, per_row)
        self._layers = [States(layer, axis_orders.in_play, axis_orders.write) for layer in states]
        self._read_slots = torch.empty(max_batch, dtype=torch.int32, device=device)
        self._write_slots = torch.empty(max_batch * nodes, dtype=torch.int32, device=device)
        self._track_source = torch.empty(max_batch, dtype=torch.int32, device=device)
        self.renew()

    def renew(self) -> None:
        super().renew()
        self.current_input.fill_(-1)
        for buffer in (self.row_slot, self.slot_row, self._read_slots, self._write_slots, self._track_source):
            buffer.zero_()
        drafts = torch.arange(self.first, self.states.shape[1], device=self.states.device)
        self._axis_orders.mark(drafts, self._axis_orders.write)

    @property
    def bookkeeping(self) -> tuple[torch.Tensor, ...]:
        return self.current_input, self.row_slot, self.slot_row

    @property
    def nbytes(self) -> int:
        drafts = sum(states[:, self.first :].nbytes for states in (self.states, self.conv_states))
        buffers = (self._read_slots, self._write_slots, self._track_source)
        return self._shared_bytes() + sum(t.nbytes for t in buffers) + drafts

    def convolve(
        self,
        index: int,
        x: torch.Tensor,
        batch: VerifyBatch,
        *,
        parts: Parts,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> dict[str, torch.Tensor]:
        if index == 0:
            # Only now is the commit before certainly done: `prepare` may have run beside it.
            self._place(batch)
        y = self._conv.conv1d_verify_slots(
            x,
            conv_states=self.conv_states[index],
            weight=weight,
            bias=bias,
            activation=activation,
            nodes=self._nodes(batch),
        )
        pieces = y.split([math.prod(shape) for shape in parts.values()], dim=-1)
        return {name: piece.unflatten(-1, parts[name]) for name, piece in zip(parts, pieces, strict=True)}

    def _place(self, batch: VerifyBatch) -> None:
        """Where each row's verify reads and where each of its nodes writes, once a forward."""
        self._common.place_nodes(
            self._read_slots[: batch.size],
            self._per_node(self._write_slots, batch),
            self.rows(batch),
            self._books,
        )

    def _warm_up_verify(self, batch: VerifyBatch) -> None:
        super()._warm_up_verify(batch)
        self._place(batch)

    def _nodes(self, batch: VerifyBatch) -> NodeSlots:
        parents = None if batch.chain else self.parents(batch)
        return NodeSlots(self._read_slots[: batch.size], self._per_node(self._write_slots, batch), parents)

    def _where(self, index: int, batch: VerifyBatch) -> dict[str, Any]:
        return {"states": self._layers[index], "nodes": self._nodes(batch)}

    def commit(
        self,
        batch: VerifyBatch,
        *,
        last_correct: torch.Tensor,
        track_slots: torch.Tensor | None,
        steps_to_track: torch.Tensor | None,
    ) -> None:
        sources = self._track_source[: batch.size]
        self._common.commit_slots(
            self._books,
            self.rows(batch),
            write_slots=self._per_node(self._write_slots, batch),
            last_correct=last_correct,
            steps_to_track=steps_to_track,
            track_src=sources,
        )
        if steps_to_track is not None and track_slots is not None:
            destinations = torch.where(sources > 0, track_slots, torch.zeros_like(track_slots))
            self._move(sources, destinations)
            self.discard(destinations)

    def settle(self, slots: torch.Tensor) -> None:
        """Copy the newest states of ``slots`` into them, where those lie in draft slots."""
        slots = slots.reshape(-1)
        newest = torch.empty(slots.shape[0], dtype=torch.int32, device=slots.device)
        self._common.newest_slots(newest, self._books, slots=slots)
        if self.counts is not None:
            self.counts.moves(newest, slots)
        self._move(newest, slots)
        self.discard(slots)

    def discard(self, slots: torch.Tensor) -> None:
        self._common.forget_inputs(self._books, slots=slots.reshape(-1))

    def _move(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        """Copy recurrent and convolution states, where both slots are > 0 and differ; their axis order goes along."""
        for states in (self.states, self.conv_states):
            self._common.move_states(states, src_slots=src_slots, dst_slots=dst_slots)
        self._axis_orders.move(src_slots, dst_slots)
