"""The mamba pools of the project's own modes: SGLang's slots without SGLang's per-draft state copies.

SGLang's ``MambaPool`` allocates, beside the slots, one recurrent state and one convolution window for every draft node
of every running request. `MtpMambaPool` keeps the slots only, and owns two things more: the layout bit of every slot
and a `DraftStore`, which the linear-attention backend opens when it is built (only the backend knows the model). It
keeps the rule that nobody ever reads a slot behind its request: whoever reads a slot settles it first, whoever
overwrites a slot forgets what was known about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from .config import current
from .drafts import DraftStore
from .errors import MtpError
from .layout import VK, layouts_for


class HostCopy(NamedTuple):
    """States on the host: SGLang's own copy, and the layout [n] uint8 each of them is in."""

    states: Any
    layouts: torch.Tensor


class MtpMambaPool(MambaPool):
    """``MambaPool`` with no intermediate buffers; same constructor.

    Attributes
        max_nodes: the largest draft length, or None without speculation.
        request_rows: request rows, the padding row included.
        layouts: which slot is in which layout.
        store: what the mode keeps of draft nodes; None until a backend opened it.
    """

    def __init__(self, *, speculative_num_draft_tokens: int | None = None, spec_state_size: int, **kwargs: Any) -> None:
        # Without a draft length SGLang's pool allocates no per-draft copies.
        super().__init__(speculative_num_draft_tokens=None, spec_state_size=spec_state_size, **kwargs)
        self.max_nodes = speculative_num_draft_tokens
        self.request_rows = spec_state_size + 1
        self.layouts = layouts_for(self.mamba_cache.temporal, current().state_layout)
        self.store: DraftStore | None = None
        self._opened_as: object = None

    def open_store(self, kind: object, make: Callable[[], DraftStore]) -> DraftStore:
        """The store of this pool, made on the first call; later backends over the same pool share it.

        ``kind`` describes what ``make`` would make: backends over one pool must ask for equal ones.
        """
        if self.store is None:
            self.store, self._opened_as = make(), kind
        elif self._opened_as != kind:
            raise MtpError(f"two backends over one mamba pool want different buffers: {self._opened_as}, {kind}")
        return self.store

    @property
    def speculative_bytes(self) -> int:
        """Bytes held for speculation beside the slots."""
        return 0 if self.store is None else self.store.nbytes

    def settle(self, slots: torch.Tensor) -> None:
        """Bring the states of ``slots`` up to date, in the layout they are in; entries <= 0 are skipped."""
        if self.store is not None:
            self.store.settle(slots)

    def settle_for_sglang(self, slots: torch.Tensor) -> None:
        """Bring ``slots`` up to date and into the layout that SGLang's own kernels read."""
        self.settle(slots)
        self.layouts.turn(slots, VK)

    def overwritten_by_sglang(self, slots: torch.Tensor) -> None:
        """SGLang has written, or is about to write, the whole states of ``slots``; entries <= 0 are skipped."""
        if self.store is not None:
            self.store.discard(slots)
        self.layouts.mark(slots, VK)

    def clear_slots(self, indices: torch.Tensor) -> None:
        super().clear_slots(indices)
        self.overwritten_by_sglang(indices)

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        self.settle(src_indices)
        super().copy_from(src_indices, dst_indices)
        self.overwritten_by_sglang(dst_indices)
        self.layouts.move(src_indices, dst_indices)

    def get_cpu_copy(self, indices: torch.Tensor) -> HostCopy:
        self.settle(indices)
        return HostCopy(super().get_cpu_copy(indices), self.layouts.bits[indices].cpu())

    def load_cpu_copy(self, mamba_cache_cpu: HostCopy, indices: torch.Tensor) -> None:
        super().load_cpu_copy(mamba_cache_cpu.states, indices)
        self.overwritten_by_sglang(indices)
        self.layouts.bits[indices] = mamba_cache_cpu.layouts.to(self.layouts.bits.device)


class DraftSlotPool(MtpMambaPool):
    """`MtpMambaPool` with a draft slot for every draft node of every request row, behind the ordinary slots.

    Attributes
        first_draft_slot: where they begin. SGLang allocates the slots before only.
    """

    def __init__(
        self, *, size: int, speculative_num_draft_tokens: int | None = None, spec_state_size: int, **kwargs: Any
    ) -> None:
        super().__init__(
            size=size + (spec_state_size + 1) * (speculative_num_draft_tokens or 0),
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            spec_state_size=spec_state_size,
            **kwargs,
        )
        self.size = size
        self.first_draft_slot = size + 1
