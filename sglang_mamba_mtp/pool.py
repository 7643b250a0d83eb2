"""The mamba pool of the project's own modes: SGLang's slots without SGLang's per-draft state copies.

SGLang's ``MambaPool`` allocates, beside the slots, one recurrent state and one convolution window for every draft node
of every running request. :class:`MtpMambaPool` keeps the slots only. In replay mode it owns a
:class:`~sglang_mamba_mtp.window.Window`, which the linear-attention backend opens when it is built (only the backend
knows the model family), and keeps the rule that nobody ever reads a checkpoint behind its request: whoever reads a slot
settles it first, whoever overwrites a slot forgets what was pending for it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from .errors import MtpError
from .window import FoldOp, Window, WindowLayout


class MtpMambaPool(MambaPool):
    """``MambaPool`` with no intermediate buffers; same constructor."""

    def __init__(self, *, speculative_num_draft_tokens: int | None = None, spec_state_size: int, **kwargs: Any) -> None:
        # Without a draft length SGLang's pool allocates no per-draft copies.
        super().__init__(speculative_num_draft_tokens=None, spec_state_size=spec_state_size, **kwargs)
        self.max_nodes = speculative_num_draft_tokens
        self.request_rows = spec_state_size + 1
        self.window: Window | None = None

    def open_window(self, layout: WindowLayout, *, fold: FoldOp, max_batch: int) -> Window:
        """The window of this pool, allocated on the first call; later backends over the same pool share it."""
        if self.window is None:
            self.window = Window(
                layout,
                fold=fold,
                checkpoint=self.mamba_cache.temporal,
                conv_states=self.mamba_cache.conv[0],
                rows=self.request_rows,
                max_batch=max_batch,
            )
        elif self.window.layout != layout:
            raise MtpError(f"two backends over one mamba pool want different windows: {self.window.layout}, {layout}")
        return self.window

    @property
    def speculative_bytes(self) -> int:
        """Bytes held for speculation beside the slots."""
        return 0 if self.window is None else self.window.nbytes

    def settle(self, slots: torch.Tensor) -> None:
        """Bring the checkpoints of ``slots`` up to date; entries <= 0 are skipped."""
        if self.window is not None:
            self.window.settle(slots)

    def discard(self, slots: torch.Tensor) -> None:
        """Forget what is pending for ``slots``; entries <= 0 are skipped."""
        if self.window is not None:
            self.window.discard(slots)

    def clear_slots(self, indices: torch.Tensor) -> None:
        super().clear_slots(indices)
        self.discard(indices)

    def copy_from(self, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        self.settle(src_indices)
        super().copy_from(src_indices, dst_indices)
        self.discard(dst_indices)

    def get_cpu_copy(self, indices: torch.Tensor) -> Any:
        self.settle(indices)
        return super().get_cpu_copy(indices)

    def load_cpu_copy(self, mamba_cache_cpu: Any, indices: torch.Tensor) -> None:
        super().load_cpu_copy(mamba_cache_cpu, indices)
        self.discard(indices)
