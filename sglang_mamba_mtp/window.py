"""Replay mode's buffers: what a request's committed but not yet folded tokens need to be replayed.

A target verify reads a state slot's checkpoint and writes none. The inputs of the nodes it scored go into the request
row's *window*; the commit only says which of them were accepted. The accepted ones are *pending* until a verify finds
more than ``threshold`` of them and folds them into the checkpoint, or until somebody else needs the checkpoint and
:meth:`Window.settle` folds them on demand.

Buffers, all on the pool's device (L layers, S slots, R request rows, N nodes, C = threshold + 2 N positions)::

    pending[S]        int32   tokens of the slot's request that are not in the checkpoint yet
    window_row[S]     int32   the request row whose window holds them
    order[R, C]       int32   a permutation of window positions: the first `pending` entries are the pending tokens,
                              oldest first; node i of the running verify is at order[row, pending + i]; the rest is free
    fields[name]      [L, R, C, ...] inputs of the family's recurrence (GDN: k, v, g, beta; Mamba2: x, B, dt)
    conv_inputs       [L, R, N, dim] the running verify's convolution inputs
    parents           [batch, N] int32, ancestors [batch, N] int64: the running verify's draft tree

A verify stores only at free positions, so no kernel overwrites what another program of it still reads, and accepted
nodes of a tree become contiguous by permuting ``order``: no inputs are moved. Everything here is read and written on
the forward stream alone, without host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from mamba_mtp_kernels import common, conv1d


@dataclass(frozen=True)
class TokenField:
    """One input of the recurrence, kept for every window token: ``shape`` per token and layer, ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def bytes(self) -> int:
        """Bytes of one token in one layer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WindowLayout:
    """Sizes of a window, enough to allocate it and to account for it.

    ``threshold`` is how many pending tokens a verify replays without folding (``--mamba-mtp-window``); ``nodes`` the
    largest ``draft_token_num``; ``conv_dim`` and ``conv_dtype`` describe the convolution's inputs.
    """

    layers: int
    nodes: int
    threshold: int
    fields: Mapping[str, TokenField]
    conv_dim: int
    conv_dtype: torch.dtype

    @property
    def capacity(self) -> int:
        """Window positions of a request row: a verify that folds keeps what it folds apart from its nodes."""
        return self.threshold + 2 * self.nodes

    def bytes_per_row(self) -> int:
        """Bytes one request row takes over all layers, bookkeeping included."""
        tokens = self.capacity * sum(field.bytes() for field in self.fields.values())
        conv = self.nodes * self.conv_dim * self.conv_dtype.itemsize
        return self.layers * (tokens + conv) + 4 * self.capacity


FoldOp = Callable[..., None]


class Window:
    """The windows of all request rows and the pending counts of all slots (see the module's text)."""

    def __init__(
        self,
        layout: WindowLayout,
        *,
        fold: FoldOp,
        checkpoint: torch.Tensor,
        conv_states: torch.Tensor,
        rows: int,
        max_batch: int,
    ) -> None:
        """``checkpoint`` is the pool's ``temporal`` [L, S, ...] and ``conv_states`` its ``conv[0]`` [L, S, dim, K-1];
        ``fold`` the family's fold; ``rows`` the request rows, ``max_batch`` the longest (padded) batch."""
        device = checkpoint.device
        self.layout = layout
        self.checkpoint = checkpoint
        self.conv_states = conv_states
        self._fold = fold
        self._common = common.ops_for(device)
        self._conv = conv1d.ops_for(device)
        slots = checkpoint.shape[1]
        self.pending = torch.zeros(slots, dtype=torch.int32, device=device)
        self.window_row = torch.zeros(slots, dtype=torch.int32, device=device)
        self.order = torch.arange(layout.capacity, dtype=torch.int32, device=device).repeat(rows, 1)
        self.fields = {
            name: torch.zeros((layout.layers, rows, layout.capacity, *field.shape), dtype=field.dtype, device=device)
            for name, field in layout.fields.items()
        }
        self.conv_inputs = torch.zeros(
            (layout.layers, rows, layout.nodes, layout.conv_dim), dtype=layout.conv_dtype, device=device
        )
        self._parents = torch.zeros(max_batch * layout.nodes, dtype=torch.int32, device=device)
        self._ancestors = torch.zeros(max_batch * layout.nodes, dtype=torch.int64, device=device)
        #: order in which a verify starts its rows: any permutation gives the same results
        self.schedule = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._track_count = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._max_batch = max_batch

    @property
    def nbytes(self) -> int:
        """Bytes held, bookkeeping included."""
        tensors = [self.pending, self.window_row, self.order, self.conv_inputs, self._parents, self._ancestors]
        return sum(t.nbytes for t in (*tensors, self.schedule, *self.fields.values()))

    def parents(self, batch: int, nodes: int) -> torch.Tensor:
        """Parent of every node of the running verify, [batch, nodes] int32, -1 for roots."""
        return self._links(self._parents, batch, nodes)

    def ancestors(self, batch: int, nodes: int) -> torch.Tensor:
        """Strict ancestors of every node of the running verify as bits, [batch, nodes] int64."""
        return self._links(self._ancestors, batch, nodes)

    def _links(self, buffer: torch.Tensor, batch: int, nodes: int) -> torch.Tensor:
        if batch > self._max_batch or nodes > self.layout.nodes:
            raise ValueError(
                f"a verify of {batch} requests x {nodes} draft nodes does not fit replay buffers made for "
                f"{self._max_batch} x {self.layout.nodes}; raise --max-running-requests or "
                f"--speculative-num-draft-tokens"
            )
        return buffer[: batch * nodes].view(batch, nodes)

    def build_tree(
        self,
        batch: int,
        nodes: int,
        next_token: torch.Tensor | None,
        next_sibling: torch.Tensor | None,
    ) -> None:
        """Fill :meth:`parents` and :meth:`ancestors` from SGLang's links, once a forward.

        Links are [batch, nodes] with -1 for none, or None for chains.
        """
        self._common.build_tree(
            self.parents(batch, nodes),
            self.ancestors(batch, nodes),
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
            batch=batch,
        )

    def schedule_rows(self, slots: torch.Tensor) -> None:
        """Fill :attr:`schedule` for a verify of ``slots`` [batch]: rows that will fold take longest and go first."""
        self._common.fold_first(
            self.schedule, slots=slots, pending=self.pending, fold_threshold=self.layout.threshold
        )

    def layer_conv_inputs(self, index: int, nodes: int) -> torch.Tensor:
        """Where one layer's verify of ``nodes`` draft nodes keeps its convolution inputs, [rows, nodes, dim]."""
        return self.conv_inputs[index, :, :nodes]

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The window tensors of one layer, named as the verify kernels take them (``window_<field>``)."""
        return {f"window_{name}": tensor[index] for name, tensor in self.fields.items()}

    def commit(
        self,
        *,
        slots: torch.Tensor,
        rows: torch.Tensor,
        nodes: int,
        last_correct: torch.Tensor,
        track_slots: torch.Tensor | None,
        steps_to_track: torch.Tensor | None,
    ) -> None:
        """Record a verify's accepted paths and bring the convolution windows up to date.

        ``slots``, ``rows``, ``last_correct`` [batch]: state slot, request row and last accepted node; rows with
        ``slots <= 0`` are padding. Where ``steps_to_track`` [batch] holds a node (>= 0), the state at that node is
        written into ``track_slots`` [batch] (recurrent and convolution state), which the radix cache will own.
        """
        batch = last_correct.shape[0]
        parents = self.parents(batch, nodes)
        counts = self._track_count[:batch]
        self._common.commit_window(
            pending=self.pending,
            window_row=self.window_row,
            order=self.order,
            slots=slots,
            rows=rows,
            last_correct=last_correct,
            steps_to_track=steps_to_track,
            parents=parents,
            fold_threshold=self.layout.threshold,
            track_count=counts,
        )
        if steps_to_track is not None and track_slots is not None:
            destinations = torch.where(counts > 0, track_slots, torch.zeros_like(track_slots))
            self._run_fold(slots, destinations, rows, counts)
            self.discard(destinations)
        self._conv.commit_conv(
            self.conv_states,
            self.conv_inputs[:, :, :nodes],
            slots=slots,
            rows=rows,
            last_correct=last_correct,
            parents=parents,
            steps_to_track=steps_to_track,
            track_slots=track_slots,
        )

    def settle(self, slots: torch.Tensor) -> None:
        """Fold the pending tokens of ``slots`` (any integer dtype, entries <= 0 skipped) into their checkpoints."""
        live = slots.clamp(min=0).to(torch.int64)
        self._run_fold(slots, slots, self.window_row[live], self.pending[live])
        self.discard(slots)

    def discard(self, slots: torch.Tensor) -> None:
        """Forget the pending tokens of ``slots``, whose checkpoints somebody has written or is about to write."""
        # Slot 0 is nobody's and never has pending tokens, so padding may land there.
        self.pending.index_fill_(0, slots.clamp(min=0).reshape(-1).to(torch.int64), 0)

    def _run_fold(
        self, src_slots: torch.Tensor, dst_slots: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> None:
        self._fold(
            self.checkpoint,
            **{f"window_{name}": tensor for name, tensor in self.fields.items()},
            order=self.order,
            src_slots=src_slots,
            dst_slots=dst_slots,
            rows=rows,
            counts=counts,
        )
