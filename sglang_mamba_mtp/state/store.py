"""What a mode keeps of the draft nodes between a verify and whatever needs the state next.

A verify scores draft nodes without deciding which of them count; the commit says so. Where the nodes' states or inputs
lie meanwhile is the mode's business: a `DraftStore`. The pool owns it, the backends hand it batches.

Two rules hold for every store. Whoever reads a slot other than the verify of the request that owns it *settles* it
first; whoever overwrites a slot makes the store *forget* what it knew about it (`discard`). Everything runs on the
forward stream, without host reads.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from mamba_mtp_kernels import common, conv1d
from mamba_mtp_kernels.common.chain import chain_tree
from mamba_mtp_kernels.common.operands import Rows

from ..families.base import VerifyOp
from .counts import Counts

#: What the channels of a convolution are to the recurrence, in order: names, and a token's shapes.
Parts = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class VerifyBatch:
    """The rows of one verify: ``slots``, ``rows`` and ``lengths`` [batch] (any integer dtype), state slot, request row
    and how many tokens the request had committed before; a slot <= 0 is padding. ``nodes`` is the draft length,
    ``chain`` whether SGLang gave no tree links."""

    slots: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    nodes: int
    chain: bool

    @classmethod
    def padding(cls, size: int, nodes: int, device: torch.device) -> VerifyBatch:
        """``size`` rows of nobody."""
        slots = torch.full((size,), -1, dtype=torch.int32, device=device)
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return cls(slots, rows=zeros, lengths=zeros, nodes=nodes, chain=True)

    @property
    def size(self) -> int:
        return self.slots.shape[0]


#: Batches that Triton compiles for apart: of 1, of a multiple of 16, of any other size.
WARM_SIZES = (1, 2, 16)

#: SGLang hands over slots and nodes as either, by version, by device and by who asks.
INDEX_DTYPES = (torch.int32, torch.int64)


def padding_slots(device: torch.device | str) -> Iterator[torch.Tensor]:
    """Slots of nobody, in every form that Triton compiles apart."""
    for size, dtype in itertools.product(WARM_SIZES, INDEX_DTYPES):
        yield torch.full((size,), -1, dtype=dtype, device=device)
    # A request's own slot is an entry of a longer tensor, and not aligned as a tensor of its own is.
    yield torch.full((2,), -1, dtype=torch.int64, device=device)[1:]


class DraftStore(ABC):
    """See the module's text.

    Attributes
        states: the pool's ``temporal`` [L, S, ...].
        conv_states: the pool's ``conv[0]`` [L, S, dim, K-1].
        nodes: the largest draft length.
        counts: where folds and settles are counted, or None: set where metrics are exported.
    """

    def __init__(
        self, *, verify: VerifyOp, states: torch.Tensor, conv_states: torch.Tensor, nodes: int, max_batch: int
    ) -> None:
        """``verify`` is the family's kernel for this mode, ``max_batch`` the longest (padded) batch."""
        device = states.device
        self.states, self.conv_states, self.nodes = states, conv_states, nodes
        self.counts: Counts | None = None
        self._verify = verify
        self._common = common.ops_for(device)
        self._conv = conv1d.ops_for(device)
        self._max_batch = max_batch
        self._parents = torch.empty(max_batch * nodes, dtype=torch.int32, device=device)
        self._ancestors = torch.empty(max_batch * nodes, dtype=torch.int64, device=device)
        self._chain = chain_tree(nodes, device)

    # ------------------------------------------------------------------------------------------------------- a verify

    def parents(self, batch: VerifyBatch) -> torch.Tensor:
        """Parent of every node of the running verify, [batch, nodes] int32, -1 for roots."""
        return self._of_trees(self._parents, self._chain[0], batch)

    def ancestors(self, batch: VerifyBatch) -> torch.Tensor:
        """Strict ancestors of every node of the running verify as bits, [batch, nodes] int64."""
        return self._of_trees(self._ancestors, self._chain[1], batch)

    def rows(self, batch: VerifyBatch) -> Rows:
        """The running verify as the kernels take it: its rows and their draft trees."""
        return Rows(
            batch.slots,
            batch.rows,
            parents=self.parents(batch),
            ancestors=self.ancestors(batch),
            chain=batch.chain,
            **self._of_step(),
        )

    def _of_step(self) -> dict[str, torch.Tensor]:
        """What else of `Rows` this store makes once a step."""
        return {}

    def _of_trees(self, buffer: torch.Tensor, of_chain: torch.Tensor, batch: VerifyBatch) -> torch.Tensor:
        """[batch, nodes] of what `prepare` has left in ``buffer``; where all trees are chains, ``of_chain`` [nodes]."""
        if not batch.chain:
            return self._per_node(buffer, batch)
        self._check_room(batch)
        # (expand would give a row of one a stride of its own, and every kernel would be compiled once more)
        return of_chain.as_strided((batch.size, batch.nodes), (0, 1))

    def _per_node(self, buffer: torch.Tensor, batch: VerifyBatch) -> torch.Tensor:
        self._check_room(batch)
        return buffer[: batch.size * batch.nodes].view(batch.size, batch.nodes)

    def _check_room(self, batch: VerifyBatch) -> None:
        if batch.size > self._max_batch or batch.nodes > self.nodes:
            raise ValueError(
                f"a verify of {batch.size} requests x {batch.nodes} draft nodes does not fit buffers made for "
                f"{self._max_batch} x {self.nodes}; raise --max-running-requests or --speculative-num-draft-tokens"
            )

    def prepare(self, batch: VerifyBatch, next_token: torch.Tensor | None, next_sibling: torch.Tensor | None) -> None:
        """Once a forward, before its first layer: the draft trees from SGLang's links ([batch, nodes], -1 for none;
        chains need none). May run on another stream than the commit before: reads nothing that a commit writes."""
        self._check_room(batch)
        if batch.chain:
            return
        self._common.build_tree(
            self.parents(batch),
            self.ancestors(batch),
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
            batch=batch.size,
        )

    @abstractmethod
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
        """The convolution of layer ``index`` over all nodes, each along its own path: ``x`` [T, dim]. Returns [T, ...]
        of the ``parts`` that `score` is to be given: all but those that this store keeps, and has put in place."""

    def score(self, index: int, batch: VerifyBatch, **inputs: Any) -> torch.Tensor:
        """The recurrence of layer ``index`` over all nodes: ``inputs`` are what `convolve` gave, and what else the
        family's verify takes."""
        return self._verify(**inputs, **self._where(index, batch))

    @abstractmethod
    def _where(self, index: int, batch: VerifyBatch) -> dict[str, Any]:
        """What the verify kernels of every family take besides the nodes' inputs: where things lie."""

    @abstractmethod
    def commit(
        self,
        batch: VerifyBatch,
        *,
        last_correct: torch.Tensor,
        track_slots: torch.Tensor | None,
        steps_to_track: torch.Tensor | None,
    ) -> None:
        """Record a verify's accepted paths.

        ``last_correct`` [batch]: last accepted node, < 0 for none. Where ``steps_to_track`` [batch] holds a node
        (>= 0), the state at that node, recurrent and convolution, is written into ``track_slots`` [batch], which the
        radix cache will own.
        """

    # -------------------------------------------------------------------------------------------------------- a slot

    @abstractmethod
    def settle(self, slots: torch.Tensor) -> None:
        """Bring the states of ``slots`` [n] (any integer dtype, entries <= 0 skipped) up to date in place."""

    @abstractmethod
    def discard(self, slots: torch.Tensor) -> None:
        """Forget what is known about ``slots``, whose states somebody has written or is about to write."""

    # ------------------------------------------------------------------------------------------------------- start-up

    def warm_up(self, lengths: Iterable[int], *, tracked: bool) -> None:
        """Launch everything beside the verify itself once for each way in which it will be called, on padding alone.

        A kernel is compiled when it is first launched, and every rank waits for the slowest. Capturing graphs launches
        the verify, and nothing of what follows it. ``lengths`` are the draft lengths that
        will be met, ``tracked`` says whether commits write snapshots. No state and no bookkeeping changes.
        """
        device = self.states.device
        for size, nodes in itertools.product(WARM_SIZES, lengths):
            batch = VerifyBatch.padding(size, nodes, device)
            self._warm_up_verify(batch)
            for dtype in INDEX_DTYPES:
                nobody = torch.full((size,), -1, dtype=dtype, device=device)
                self.commit(
                    batch,
                    last_correct=nobody,
                    track_slots=nobody.to(torch.int64) if tracked else None,
                    steps_to_track=nobody if tracked else None,
                )
        for slots in padding_slots(device):
            self.settle(slots)
            self.discard(slots)

    def _warm_up_verify(self, batch: VerifyBatch) -> None:
        """What a verify launches beside the family's kernels: ``batch`` is padding."""
        links = torch.full((batch.size, batch.nodes), -1, dtype=torch.int64, device=self.states.device)
        self.prepare(replace(batch, chain=False), links, links)

    # -------------------------------------------------------------------------------------------------------- memory

    @abstractmethod
    def renew(self) -> None:
        """Fill every buffer as a new store has it: nothing is known about any slot or row.

        In place, because captured graphs hold addresses. For a store whose memory was given back and taken again, which
        may hold anything; constructors end with it.
        """
        self._parents.zero_()
        self._ancestors.zero_()
        for table, chain in zip(self._chain, chain_tree(self.nodes, self.states.device), strict=True):
            table.copy_(chain)

    @property
    @abstractmethod
    def bookkeeping(self) -> tuple[torch.Tensor, ...]:
        """The tensors that say where a request's newest tokens are."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held for speculation, bookkeeping included."""

    def _shared_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.bookkeeping, self._parents, self._ancestors, *self._chain))
