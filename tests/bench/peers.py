"""What the modes are measured against beside SGLang's own verify: steps in its other ways, plain decode, bare memory.

A peer that cannot run here (another family, a tree, a package or a GPU that it needs) says so: `why_not`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from cases import GdnShape
from replayssm import replayssm_kind, scatter_windows
from step import ACTIVATIONS, Drafts, Stock, StockConvolution, open_pools, split
from stock import StockConv

ROWS, COLUMNS = 32, 128
"""The piece of a state that a program of `floors` moves: 16 KiB of float32."""


class Replayssm(StockConvolution):
    """SGLang's `--enable-linear-replayssm-spec`: chains of GDN, a window of inputs or updates a request."""

    @staticmethod
    def why_not(drafts: Drafts) -> str | None:
        if not isinstance(drafts.layer.shape, GdnShape):
            return "GDN only"
        return None if drafts.chain else "chains only"

    def __init__(self, drafts: Drafts, *, layers: int, hollow: bool = False) -> None:
        """hollow: to compile kernels only; one layer stands for all."""
        layer, shape, nodes = drafts.layer, drafts.layer.shape, drafts.nodes
        layers = 1 if hollow else layers
        super().__init__(drafts, layers=layers)
        self.kernels = replayssm_kind()(
            heads=(shape.H, shape.HV), dims=(shape.K, shape.V), layers=layers, slots=drafts.first_draft_slot,
            rows=drafts.sets * drafts.batch, nodes=nodes, dtype=ACTIVATIONS, device=layer.device,
        )  # fmt: skip
        self.phases = self.kernels.phases(len(drafts.accepted), nodes)

    def score(self, which: int, index: int, y: torch.Tensor) -> torch.Tensor:
        where = {"index": index, "states": self.states[index], **self._where(which), "starts": self.starts}
        rest = self.drafts.inputs[which][1:]
        if self.kernels.strided:
            return self.layer.score(self.kernels.verify, split(self.layer, y), *rest, **where)
        return self.layer.stock_score(self.kernels, y, *rest, **where)

    def _where(self, which: int) -> dict[str, torch.Tensor]:
        return {"slots": self.drafts.slots[which], "rows": self.drafts.rows[which]}

    def commit(self, which: int, last: torch.Tensor, track: torch.Tensor) -> None:
        # SGLang has the lengths at hand
        lengths = self.drafts.accept_lens if last is self.drafts.last else (last + 1).int()
        tracked = {"track_slots": self.drafts.track_slots[which], "track": track}
        self.kernels.commit(self.states, **self._where(which), accept_lens=lengths, **tracked)
        slots = self.drafts.slots[which]
        scatter_windows(self.conv, self.conv_states, self.windows, slots=slots, last=last, **tracked)

    def settle(self, which: int) -> None:
        self.kernels.settle(self.states, **self._where(which))


class FlashInfer(Stock):
    """SGLang's verify by FlashInfer's kernel (`--linear-attn-decode-backend flashinfer`): a state a node, scattered."""

    @staticmethod
    def why_not(drafts: Drafts) -> str | None:
        shape = drafts.layer.shape
        if not isinstance(shape, GdnShape):
            return "GDN only"
        if not drafts.chain:
            return "chains only"
        if shape.state != "fp32":
            return "float32 states only"
        if drafts.layer.device.type != "cuda" or torch.cuda.get_device_capability(drafts.layer.device)[0] != 9:
            return "compute capability 9 only"
        try:
            from flashinfer import gdn_decode
        except Exception as error:
            # its packages are many, and some fail as they are loaded
            return f"{type(error).__name__}: {error}"
        if getattr(gdn_decode, "get_tile_v_mtp", None) is None:
            return "its verify cannot be loaded, as where CuTe DSL is missing"
        return None

    def score(self, which: int, index: int, y: torch.Tensor) -> torch.Tensor:
        from flashinfer.gdn_decode import gated_delta_rule_mtp

        drafts, buffer = self.drafts, self.buffer[index]
        self.kernels = _MtpKernels(partial(gated_delta_rule_mtp, intermediate_states_buffer=buffer))
        where = {"states": self.states[index], "slots": drafts.slots[which]}
        return self.layer.stock_score(self.kernels, y, *drafts.inputs[which][1:], **where)


class _MtpKernels:
    """FlashInfer's verify with the signature of StockGdn's."""

    def __init__(self, run: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.run = run

    def verify(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
        A_log: torch.Tensor, dt_bias: torch.Tensor, states: torch.Tensor, slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        q, k, v = (x[0].unflatten(0, (slots.shape[0], -1)) for x in (q, k, v))
        a, b = (x.unflatten(0, (slots.shape[0], -1)) for x in (a, b))
        out, _ = self.run(
            q=q,
            k=k,
            v=v,
            initial_state=states,
            initial_state_indices=slots,
            A_log=A_log,
            a=a,
            dt_bias=dt_bias,
            b=b,
            scale=None,
            output=None,
            disable_state_update=True,
            use_qk_l2norm=True,
        )
        return out.flatten(0, 1)


PEERS: dict[str, type[Replayssm] | type[FlashInfer]] = {"replayssm": Replayssm, "flashinfer": FlashInfer}


class Decode:
    """SGLang's plain decode: the first node of every row is its one token."""

    def __init__(self, drafts: Drafts, *, layers: int, hollow: bool = False) -> None:
        """hollow: to compile kernels only; one layer stands for all."""
        self.drafts, self.layer = drafts, drafts.layer
        self.conv, self.kernels = StockConv(), drafts.layer.stock()
        self.states, self.conv_states = open_pools(drafts.layer, 1 if hollow else layers, drafts.first_draft_slot)

    def _tokens(self, which: int) -> list[torch.Tensor]:
        return [x[: self.drafts.batch] for x in self.drafts.inputs[which]]

    def prepare(self, which: int) -> None:
        pass

    def convolve(self, which: int, index: int) -> torch.Tensor:
        return self.conv.decode(
            self._tokens(which)[0],
            conv_states=self.conv_states[index],
            weight=self.layer.weight,
            bias=self.layer.bias,
            slots=self.drafts.slots[which],
        )

    def score(self, which: int, index: int, y: torch.Tensor) -> torch.Tensor:
        where = {"states": self.states[index], "slots": self.drafts.slots[which]}
        return self.layer.stock_decode(self.kernels, y, *self._tokens(which)[1:], **where)


@triton.jit
def _move_kernel(states, found, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WRITE: tl.constexpr):
    """Read a piece; write it back, changed, or make sure that it was read."""
    at = states + tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    at += tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    piece = tl.load(at)
    if WRITE:
        tl.store(at, -piece)
    else:
        total = tl.sum(tl.sum(piece.to(tl.float32), 1), 0)
        if total == 12345.678:
            tl.store(found, total)


def floors(states: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What touches every element of contiguous states once: "read", or "copy": read and written in place."""
    pieces, rest = divmod(states.numel(), ROWS * COLUMNS)
    if rest:
        raise ValueError(f"states: {states.numel()} elements, expected a multiple of {ROWS * COLUMNS}")
    found = torch.zeros(1, device=states.device)

    def move(write: bool) -> None:
        _move_kernel[(pieces,)](states, found, ROWS=ROWS, COLUMNS=COLUMNS, WRITE=write, num_warps=4)

    return {"read": partial(move, False), "copy": partial(move, True)}
