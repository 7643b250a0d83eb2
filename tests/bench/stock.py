"""SGLang's own kernels for verify and commit, called as SGLang (0.5.17 or 0.5.23) calls them.

They come from `sglang` on PYTHONPATH: an installation, or a folder that holds only the files named in the imports
below and what these import. Constructors raise ImportError where it is missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

RECURRENT = {
    "0.5.23": "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "0.5.17": "sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent",
}
"""Where a version keeps GDN's verify, which tells the versions apart where only kernel files are."""


def recurrent_module() -> tuple[str, ModuleType]:
    """(the version it is of, the module of GDN's verify). Raises ImportError where there is none."""
    reasons = []
    for version, name in RECURRENT.items():
        try:
            return version, importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError("; ".join(reasons))


def sglang_version() -> str | None:
    """SGLang's version: of the installation, else of its kernel files; None where there are none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return f"{recurrent_module()[0]} (kernel files)"
    except ImportError:
        return None


class StockCommit:
    """What SGLang does with the states of the nodes once it knows which are accepted: the accepted node's go to the
    request's slot and, where the request passes a track boundary, the tracked node's to the slot that the radix cache
    will own. Without a boundary, which is most steps, the second half is launched all the same.

    Attributes
        step_dtype: of the node numbers as SGLang hands them over.
    """

    def __init__(self) -> None:
        from sglang.kernels.ops.mamba import mamba_state_scatter_triton as module

        self._scatter = module.scatter_mamba_states_after_mtp_verify
        self.step_dtype = torch.int64 if hasattr(module, "fused_commit_track_indices") else torch.int32

    def run(
        self,
        states: torch.Tensor,
        buffer: torch.Tensor,
        conv_states: torch.Tensor,
        windows: torch.Tensor,
        *,
        slots: torch.Tensor,
        last: torch.Tensor,
        track_slots: torch.Tensor,
        track: torch.Tensor,
    ) -> None:
        """states, conv_states [layers, S, ...], written; buffer, windows [layers, B, N, ...], read. slots, track_slots
        [B] int32; last and track [B]: the accepted and the tracked node, track -1 for none."""
        caches = SimpleNamespace(
            temporal=states, intermediate_ssm=buffer, conv=[conv_states], intermediate_conv_window=[windows]
        )
        self._scatter(caches, slots, last, track_slots, track)


class StockConv:
    """Convolution of all nodes with a window per node, and the scatter of the accepted windows; plain decode's."""

    def __init__(self) -> None:
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
        from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_conv_window_scatter_with_mask

        self.update, self.scatter = causal_conv1d_update, fused_conv_window_scatter_with_mask

    @staticmethod
    def windows(layers: int, batch: int, nodes: int, conv_states: torch.Tensor, *, chain: bool) -> torch.Tensor:
        """A window per node, [layers, batch, nodes, dim, K-1]; a chain's overlap in memory, as in SGLang's pool."""
        dim, width = conv_states.shape[-2:]
        options = {"dtype": conv_states.dtype, "device": conv_states.device}
        if not chain:
            return torch.zeros(layers, batch, nodes, dim, width, **options)
        shared = torch.zeros(layers, batch, dim, nodes + width - 1, **options)
        strides = (shared.stride(0), shared.stride(1), shared.stride(3), shared.stride(2), shared.stride(3))
        return shared.as_strided((layers, batch, nodes, dim, width), strides)

    def verify(
        self,
        x: torch.Tensor,
        *,
        conv_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: torch.Tensor,
        windows: torch.Tensor,
        indices: torch.Tensor,
        links: tuple[torch.Tensor | None, torch.Tensor | None],
        parents: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [B*N, dim] to y of that shape. Overwrites conv_states[slots] (the scatter repairs it) and, given links
        (next token and sibling, [B, N]), parents [B, N]; windows [B, N, dim, K-1]; indices [B] int32: 0, 1, .."""
        batch = slots.shape[0]
        y = self.update(
            x.unflatten(0, (batch, -1)).transpose(1, 2),
            conv_states,
            weight,
            bias,
            "silu",
            conv_state_indices=slots,
            intermediate_conv_window=windows,
            intermediate_state_indices=indices,
            retrieve_next_token=links[0],
            retrieve_next_sibling=links[1],
            retrieve_parent_token=parents,
        )
        return y.transpose(1, 2).reshape(x.shape)

    def decode(
        self,
        x: torch.Tensor,
        *,
        conv_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """x [B, dim], a token a row, to y of that shape; conv_states[slots] move on."""
        return self.update(x, conv_states, weight, bias, "silu", conv_state_indices=slots)


class StockGdn:
    """Decode and verify; the scatter is that of all families."""

    def __init__(self) -> None:
        from sglang.kernels.ops.attention.fla import fused_recurrent
        from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_mamba_state_scatter_with_mask

        self.packed_decode = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
        self.update = recurrent_module()[1].fused_sigmoid_gating_delta_rule_update
        self.scatter = fused_mamba_state_scatter_with_mask

    def decode(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One token a row: mixed_qkv [B, conv dim], a and b [B, HV], out [B, 1, HV, V]."""
        self.packed_decode(
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=scale,
            initial_state=states,
            out=out,
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )

    def verify(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        buffer: torch.Tensor,
        starts: torch.Tensor,
        indices: torch.Tensor,
        parents: torch.Tensor | None,
    ) -> torch.Tensor:
        """q, k [1, B*N, H, K], v [1, B*N, HV, V] to [B*N, HV, V]; buffer [B, N, HV, V, K] takes the nodes' states;
        starts [B + 1] int32: first token of each row; parents [B, N] or None for chains."""
        out = self.update(
            A_log=A_log,
            dt_bias=dt_bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=states,
            initial_state_indices=slots,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=False,
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            intermediate_state_indices=indices,
            cache_steps=buffer.shape[1],
            retrieve_parent_token=parents,
        )
        return out.view(-1, *v.shape[2:])


def split_qkv(mixed_qkv: torch.Tensor, *, H: int, HV: int, K: int, V: int) -> list[torch.Tensor]:
    """q, k, v [1, T, heads, dim], contiguous: SGLang copies them apart in every layer of up to 8192 channels."""
    from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkv_split_gdn_prefill

    return list(fused_qkv_split_gdn_prefill(mixed_qkv, H, H, HV, K, K, V))


class StockMamba2:
    """Decode and verify; the scatter is that of all families."""

    def __init__(self) -> None:
        from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_mamba_state_scatter_with_mask
        from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

        self.update, self.scatter = selective_state_update, fused_mamba_state_scatter_with_mask

    def _run(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *,
        A: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        **options: Any,
    ) -> None:
        headdim, dstate = states.shape[-2:]
        self.update(
            states,
            x,
            dt[..., None].expand(*dt.shape, headdim),
            A[:, None, None].expand(-1, headdim, dstate),
            B,
            C,
            D[:, None].expand(-1, headdim),
            z=None,
            dt_bias=dt_bias[:, None].expand(-1, headdim),
            dt_softplus=True,
            state_batch_indices=slots,
            out=out,
            **options,
        )

    def decode(self, *inputs: torch.Tensor, **arguments: torch.Tensor) -> None:
        """One token a row: inputs and out as in verify, with N = 1."""
        self._run(*inputs, **arguments)

    def verify(
        self,
        *inputs: torch.Tensor,
        buffer: torch.Tensor,
        indices: torch.Tensor,
        parents: torch.Tensor | None,
        **arguments: torch.Tensor,
    ) -> None:
        """inputs: x, dt, B, C [B, N, ...]; out [B, N, nheads, headdim] is written; buffer [B, N, nheads, headdim,
        dstate] takes the nodes' states; indices [B] int32: 0, 1, ..; parents [B, N] or None for chains."""
        self._run(
            *inputs,
            **arguments,
            disable_state_update=True,
            intermediate_states_buffer=buffer,
            cache_steps=buffer.shape[1],
            retrieve_parent_token=parents,
            intermediate_state_indices=indices,
        )
