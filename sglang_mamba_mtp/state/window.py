"""Replay mode's buffers: what a request's committed but not yet folded tokens need to be replayed.

A target verify reads a state slot's checkpoint and writes none. The inputs of the nodes it scored go into the request
row's *window*; the commit only says which of them were accepted. The accepted ones are *pending* until a verify finds
more than ``threshold`` of them and folds them into the checkpoint, or until somebody else needs the checkpoint and
`Window.settle` folds them on demand.

Buffers, all on the pool's device (L layers, S slots, R request rows, B rows of a batch, N nodes, C = threshold + 2 N
positions)::

    pending[S]        int32   tokens of the slot's request that are not in the checkpoint yet
    newest[S]         int32   how many of them a fold leaves pending (where states are rewound, see below)
    length[S]         int32   tokens in the checkpoint and pending, together (likewise)
    window_row[S]     int32   the request row whose window holds them
    order[R, C]       int32   a permutation of window positions: the first `pending` entries are the pending tokens,
                              oldest first; node i of the running verify is at order[row, pending + i]; the rest is free
    fields[name]      [L, R, C, ...] inputs of the family's recurrence (GDN: k, v, g, beta; Mamba2: x, B, dt)
    conv_inputs       [L, R, C, dim] inputs of the convolution
    plan[B, P]        int32   of the running step: where each row of the batch stands in its window, for all layers
    schedule[B]       int32   likewise: the order in which a verify starts its rows

The checkpoint is both states of a slot, the recurrence's and the convolution's: they lag together and fold together.

A verify stores only at free positions, so no kernel overwrites what another program of it still reads, and accepted
nodes of a tree become contiguous by permuting ``order``: no inputs are moved. Everything here is read and written on
the forward stream alone, without host reads.

Because the checkpoint lags, the state at any length from the checkpoint's to the newest can be made
(`Window.state_at`): settling a slot, a snapshot and giving a slot to the radix cache are cases of it. With overlap
scheduling SGLang learns of a request's end a step late, and the tokens of the newest step may still be taken back:
where states are rewound a fold leaves those pending. The radix cache takes whole pages, so where a page is more than a
token a fold also leaves what came after the last page boundary before them, and windows are longer by a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mamba_mtp_kernels.common import operands
from mamba_mtp_kernels.common.operands import FOLD_TOKENS, Folds, States, plan_width
from mamba_mtp_kernels.conv1d.window import ConvWindow
from triton.runtime.errors import OutOfResources

from ..errors import MtpError
from ..families.base import Family, FoldOp, TokenField, VerifyOp
from .axis_order import AxisOrders
from .store import DraftStore, Parts, VerifyBatch

#: Drafts of up to this many nodes leave the rest of one step of tensor cores to pending tokens.
SMALL_DRAFT = 4
#: Pending tokens beside a draft as long as a fold: two steps of half of it and a token accepted leave two more than a
#: fold takes, so that with a window of a fold every step would fold.
WINDOW_OF_16 = 20


def threshold_for(window: int | None, nodes: int) -> int:
    """Pending tokens that a verify of ``nodes`` replays without folding: ``window`` (``--mamba-mtp-window``), or where
    none is asked for what is fastest as measured. Pending tokens and a small draft then fill the one step that tensor
    cores take anyway; larger drafts take two, or they would fold at every verify."""
    if window is not None:
        return window
    if nodes <= SMALL_DRAFT:
        return FOLD_TOKENS - nodes
    return WINDOW_OF_16 if nodes == FOLD_TOKENS else FOLD_TOKENS


def threshold_to_rewind(nodes: int, page: int) -> int:
    """Tokens that a fold may leave: the newest step's, up to ``nodes``, and the rest of a page; ``page`` 0: none."""
    return nodes + page - 1 if page else 0


@dataclass(frozen=True)
class WindowShape:
    """Sizes of a window, enough to allocate it and to account for it.

    ``threshold`` is how many pending tokens a verify replays without folding (`threshold_for`); ``nodes`` the
    largest ``draft_token_num``; ``kind`` is the class in which the family's kernels take a window, its inputs named as
    in ``fields``; ``conv_dim`` and ``conv_dtype`` describe the convolution's inputs; ``rewinds_to`` is the page size to
    whose multiples states can be brought back, 0 where they cannot.
    """

    layers: int
    nodes: int
    threshold: int
    kind: type[operands.Window]
    fields: Mapping[str, TokenField]
    conv_dim: int
    conv_dtype: torch.dtype
    rewinds_to: int = 0

    @classmethod
    def of(
        cls,
        family: Family,
        cache_params: Any,
        *,
        layers: int,
        nodes: int,
        window: int | None,
        dtype: torch.dtype,
        rewinds_to: int,
    ) -> WindowShape:
        """The window of a model: SGLang's ``Mamba2CacheParams``, ``layers`` linear-attention layers on this rank,
        ``window`` as asked for (None: the default) and activations of ``dtype``. Where it rewinds, what a fold leaves
        pending must be within the threshold."""
        return cls(
            layers=layers,
            nodes=nodes,
            threshold=max(threshold_for(window, nodes), threshold_to_rewind(nodes, rewinds_to)),
            rewinds_to=rewinds_to,
            kind=family.window,
            fields=family.fields(cache_params.shape, dtype),
            conv_dim=cache_params.shape.conv[0][0],
            conv_dtype=dtype,
        )

    @property
    def capacity(self) -> int:
        """Window positions of a request row: a verify that folds keeps what it folds apart from its nodes."""
        return self.threshold + 2 * self.nodes

    def bytes_per_row(self) -> int:
        """Bytes one request row takes over all layers, bookkeeping included."""
        conv = self.conv_dim * self.conv_dtype.itemsize
        token = conv + sum(field.bytes() for field in self.fields.values())
        return self.capacity * (self.layers * token + 4)


class Window(DraftStore):
    """The windows of all request rows and the pending counts of all slots (see the module's text)."""

    def __init__(
        self,
        shape: WindowShape,
        *,
        verify: VerifyOp,
        fold: FoldOp,
        states: torch.Tensor,
        conv_states: torch.Tensor,
        axis_orders: AxisOrders,
        rows: int,
        max_batch: int,
    ) -> None:
        """``verify`` and ``fold`` are the family's kernels; ``states`` is the pool's ``temporal`` [L, S, ...] and
        ``conv_states`` its ``conv[0]`` [L, S, dim, K-1]; ``axis_orders`` the pool's; ``rows`` the request rows,
        ``max_batch`` the longest (padded) batch."""
        super().__init__(verify=verify, states=states, conv_states=conv_states, nodes=shape.nodes, max_batch=max_batch)
        device = states.device
        self.shape = shape
        self._fold = fold
        self._axis_orders = axis_orders
        per_slot = [torch.empty(states.shape[1], dtype=torch.int32, device=device) for _ in range(4)]
        self.pending, self.window_row, self.newest, self.length = per_slot
        self.order = torch.empty((rows, shape.capacity), dtype=torch.int32, device=device)
        self.fields = {
            name: torch.empty((shape.layers, rows, shape.capacity, *field.shape), dtype=field.dtype, device=device)
            for name, field in shape.fields.items()
        }
        self.conv_inputs = torch.empty(
            (shape.layers, rows, shape.capacity, shape.conv_dim), dtype=shape.conv_dtype, device=device
        )
        books = (self.pending, self.order, shape.threshold)
        kept = {"newest": self.newest, "length": self.length, "page": shape.rewinds_to} if shape.rewinds_to else {}
        self._window = shape.kind(*books, **self.fields, **kept)
        self._conv_window = ConvWindow(*books, inputs=self.conv_inputs, **kept)
        self._states = States(states, axis_orders.in_play, axis_orders.write)
        self._layers = [(self._states.layer(i), self._window.layer(i)) for i in range(shape.layers)]
        self._conv_layers = [self._conv_window.layer(i) for i in range(shape.layers)]
        self._schedule = torch.empty(max_batch, dtype=torch.int32, device=device)
        width = plan_width(shape.nodes, shape.threshold)
        self._plan = torch.empty((max_batch, width), dtype=torch.int32, device=device)
        self._track_count = torch.empty(max_batch, dtype=torch.int32, device=device)
        self._out_of_reach = torch.zeros((), dtype=torch.int64, device=device)
        self.renew()

    def renew(self) -> None:
        super().renew()
        inputs = (self.conv_inputs, *self.fields.values())
        rewritten = (self._plan, self._track_count, self._out_of_reach)
        for buffer in (self.pending, self.window_row, self.newest, self.length, *rewritten, *inputs):
            buffer.zero_()
        for permutation in (self.order, self._schedule):
            permutation.copy_(torch.arange(permutation.shape[-1], dtype=torch.int32, device=permutation.device))

    @property
    def bookkeeping(self) -> tuple[torch.Tensor, ...]:
        return self.pending, self.window_row, self.newest, self.length, self.order

    @property
    def nbytes(self) -> int:
        buffers = (self.conv_inputs, self._plan, self._schedule, self._track_count, *self.fields.values())
        return self._shared_bytes() + sum(buffer.nbytes for buffer in buffers)

    def _of_step(self) -> dict[str, torch.Tensor]:
        return {"schedule": self._schedule, "plan": self._plan}

    def plan_rows(self, batch: VerifyBatch) -> None:
        """Where the rows stand in their windows, for all layers and the commit; rows that fold take longest and start
        first. Once a forward, with its first layer."""
        self._common.plan_rows(self._window, self.rows(batch), nodes=batch.nodes)

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
            # (`prepare` may run beside the commit before: by now that has been done)
            self.plan_rows(batch)
        _, window = self._layers[index]
        # (of the recurrence's inputs that come from the convolution the window has all but one)
        (given,) = (name for name in parts if name not in self.fields)
        y = self._conv.conv1d_verify(
            x,
            conv_states=self.conv_states[index],
            weight=weight,
            bias=bias,
            activation=activation,
            rows=self.rows(batch),
            window=self._conv_layers[index],
            parts=[math.prod(shape) if name == given else getattr(window, name) for name, shape in parts.items()],
        )
        return {given: y.unflatten(-1, parts[given])}

    def score(self, index: int, batch: VerifyBatch, **inputs: Any) -> torch.Tensor:
        """As `DraftStore.score`. Raises MtpError where so long a window of so many nodes does not fit the GPU."""
        try:
            return super().score(index, batch, **inputs)
        except OutOfResources as error:
            raise MtpError(
                f"a verify of {batch.nodes} nodes over a window of {self.shape.threshold} tokens needs "
                f"{error.required} of a GPU's {error.name}, this one has {error.limit}: choose a smaller "
                "--mamba-mtp-window, or fewer --speculative-num-draft-tokens"
            ) from error

    def _where(self, index: int, batch: VerifyBatch) -> dict[str, Any]:
        states, window = self._layers[index]
        return {"states": states, "window": window, "rows": self.rows(batch)}

    def commit(
        self,
        batch: VerifyBatch,
        *,
        last_correct: torch.Tensor,
        track_slots: torch.Tensor | None,
        steps_to_track: torch.Tensor | None,
    ) -> None:
        rows, counts = self.rows(batch), self._track_count[: batch.size]
        if self.shape.rewinds_to:
            # a request's end gives its state away at its exact length: nothing else is taken from it while it runs
            steps_to_track = None
        if self.counts is not None:
            self.counts.folds(self._window.folding(batch.slots.clamp(min=0).to(torch.int64)))
        self._common.commit_window(
            self._window,
            rows,
            window_row=self.window_row,
            last_correct=last_correct,
            steps_to_track=steps_to_track,
            track_count=counts,
            lengths=batch.lengths if self.shape.rewinds_to else None,
        )
        self._conv.commit_conv(self.conv_states, self._conv_window, rows, after_commit=True)
        if steps_to_track is not None and track_slots is not None:
            destinations = torch.where(counts > 0, track_slots, torch.zeros_like(track_slots))
            self._fold_both(Folds(batch.slots, destinations, batch.rows, counts))
            self.discard(destinations)
            self._axis_orders.mark(destinations, self._axis_orders.write)
        # From its first commit on a request's slot has the axis order we write, and folds in place keep it.
        self._axis_orders.turn(batch.slots, self._axis_orders.write)

    def _warm_up_verify(self, batch: VerifyBatch) -> None:
        super()._warm_up_verify(batch)
        self.plan_rows(batch)

    def _fold_both(self, folds: Folds) -> None:
        """Fold what is pending onto the recurrence's states and the convolution's."""
        self._fold(self._states, self._window, folds)
        self._conv.fold_conv(self.conv_states, self._conv_window, folds)

    def settle(self, slots: torch.Tensor) -> None:
        """Fold the pending tokens of ``slots`` into their checkpoints, which keep their axis order."""
        live = slots.clamp(min=0).to(torch.int64)
        pending = self.pending[live]
        if self.counts is not None:
            self.counts.settles(pending)
        self._fold_both(Folds(slots, slots, self.window_row[live], pending))
        self.discard(slots)

    def state_at(self, src: torch.Tensor, dst: torch.Tensor, lengths: torch.Tensor) -> None:
        """Bring ``dst`` [n] to the states of ``src`` [n] after exactly ``lengths`` [n] tokens (all any integer dtype).

        From the length of a slot's checkpoint to the newest one can be made; entries <= 0 are skipped. Where a slot is
        its own source the tokens past the length are forgotten; elsewhere the source stays as it is. A slot without
        pending tokens is taken as it is: it is asked for at the length it has.
        """
        live = src.clamp(min=0).to(torch.int64)
        pending = self.pending[live]
        counts = torch.minimum(pending - (self.length[live] - lengths), pending)
        self._out_of_reach += ((counts < 0) & (pending > 0) & (src > 0) & (dst > 0)).sum()
        counts = counts.clamp(min=0)
        if self.counts is not None:
            self.counts.settles(counts)
        self._fold_both(Folds(src, dst, self.window_row[live], counts))
        self.discard(dst)
        self._axis_orders.mark(torch.where(src == dst, torch.zeros_like(dst), dst), self._axis_orders.write)

    @property
    def out_of_reach(self) -> int:
        """How often a length was asked for that a checkpoint was already past. Reads from the device."""
        return int(self._out_of_reach)

    def discard(self, slots: torch.Tensor) -> None:
        # Slot 0 is nobody's and never has pending tokens, so padding may land there.
        self.pending.index_fill_(0, slots.clamp(min=0).reshape(-1).to(torch.int64), 0)
