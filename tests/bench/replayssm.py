"""SGLang's `--enable-linear-replayssm-spec` for chains of GDN, called as SGLang (0.5.17 or 0.5.23) calls it.

0.5.17 keeps the raw inputs of the nodes and replays the accepted ones into the state at every commit. 0.5.23 keeps a
ring of updates per request and folds it into the state at the commit that finds it nearly full; a tracked state is made
from both. Constructors raise ImportError where SGLang is missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from stock import StockConv, recurrent_module

FOLDER = {"0.5.23": "sglang.kernels.ops.attention.linear", "0.5.17": "sglang.kernels.ops.attention.fla"}
"""Where a version keeps its ReplaySSM kernels."""

RING = 16
"""SGLang's default --linear-replayssm-cache-len."""

NOBODY = -1
"""Slot of a padding row."""


def _module(version: str, name: str) -> ModuleType:
    return importlib.import_module(f"{FOLDER[version]}.{name}")


class FoldAtCommit:
    """0.5.17's. One window of inputs a slot, in all layers.

    Attributes
        strided: whether SGLang gives the verify views of the convolution's output, or copies.
    """

    strided = False

    def __init__(
        self, *, heads: tuple[int, int], dims: tuple[int, int], layers: int, slots: int, rows: int, nodes: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """heads (H, HV), dims (K, V); dtype of the activations."""
        self.update = recurrent_module()[1].fused_sigmoid_gating_delta_rule_update
        self._fold = _module("0.5.17", "gdn_replayssm_spec_fold").commit_gdn_replayssm_fold_all_layers
        (H, HV), (K, V) = heads, dims
        self.raw_v = torch.zeros(layers, slots, HV, nodes, V, dtype=dtype, device=device)
        self.raw_k = torch.zeros(layers, slots, H, nodes, K, dtype=dtype, device=device)
        self.g, self.beta = torch.zeros(2, layers, slots, HV, nodes, device=device)

    def phases(self, accept: int, nodes: int) -> int:
        """Steps after which a row's load repeats."""
        return 1

    def verify(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
        A_log: torch.Tensor, dt_bias: torch.Tensor, index: int, states: torch.Tensor, slots: torch.Tensor,
        rows: torch.Tensor, starts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """q, k [1, B*N, H, K], v [1, B*N, HV, V] of layer `index` to [B*N, HV, V]; states [S, HV, V, K] are read;
        slots, rows [B], starts [B + 1] int32."""
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
            cache_ring=True,
            replayssm_rawv=self.raw_v[index],
            replayssm_rawk=self.raw_k[index],
            replayssm_g=self.g[index],
            replayssm_beta=self.beta[index],
        )
        return out.view(-1, *v.shape[2:])

    def commit(
        self, states: torch.Tensor, *, slots: torch.Tensor, rows: torch.Tensor, accept_lens: torch.Tensor,
        track_slots: torch.Tensor, track: torch.Tensor,
    ) -> None:  # fmt: skip
        """states [L, S, HV, V, K]: those at slots take accept_lens [B] int32 nodes, those at track_slots end with node
        track [B] (-1: none)."""
        self._fold(
            checkpoint_state=states,
            rawv_cache=self.raw_v,
            rawk_cache=self.raw_k,
            g_cache=self.g,
            beta_cache=self.beta,
            ssm_state_indices=slots,
            accept_lens=accept_lens,
            max_cache_len=self.raw_v.shape[-2],
            num_k_heads=self.raw_k.shape[2],
            mamba_track_indices=track_slots,
            mamba_steps_to_track=track,
            null_block_id=NOBODY,
        )

    def settle(self, states: torch.Tensor, *, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Bring states at slots up to date."""


class Ring:
    """0.5.23's. A ring of compact updates a request row, in all layers; its cursors serve all of them.

    Attributes
        strided: whether SGLang gives the verify views of the convolution's output, or copies.
    """

    strided = True

    def __init__(
        self, *, heads: tuple[int, int], dims: tuple[int, int], layers: int, slots: int, rows: int, nodes: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """heads (H, HV), dims (K, V); dtype of the activations. A ring holds two trees at least."""
        module = _module("0.5.23", "gdn_replayssm_spec_decode")
        self._decode, self._advance = module.gdn_replayssm_spec_decode, module.commit_gdn_replayssm_spec
        self._materialise = module.commit_gdn_replayssm_circular
        (H, HV), (K, V) = heads, dims
        self.nodes, self.length = nodes, max(RING, 1 << (2 * nodes - 1).bit_length())
        deltas, keys = (layers, rows, HV, self.length, V), (layers, rows, H, self.length, K)
        self.d, self.k = (torch.zeros(size, dtype=dtype, device=device) for size in (deltas, keys))
        self.g = torch.zeros(layers, rows, HV, self.length, device=device)
        split = dtype != torch.float32
        self.d_low, self.k_low = (torch.zeros_like(high) if split else None for high in (self.d, self.k))
        self.write_pos, self.base = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self.is_flush = torch.zeros(rows, dtype=torch.int8, device=device)

    def phases(self, accept: int, nodes: int) -> int:
        """Steps after which a row's load repeats: a commit that leaves no room for two more trees empties the ring."""
        return (self.length - 2 * nodes) // accept + 1

    def verify(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
        A_log: torch.Tensor, dt_bias: torch.Tensor, scale: float, index: int, states: torch.Tensor,
        slots: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """q, k [B*N, H, K], v [B*N, HV, V] of layer `index` to [B*N, HV, V]; states [S, HV, V, K] are read; slots,
        rows [B], starts [B + 1] int32."""

        def of_layer(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[index]

        return self._decode(
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            checkpoint_state=states,
            d_cache=self.d[index],
            k_cache=self.k[index],
            g_cache=self.g[index],
            rawv_cache=of_layer(self.d_low),
            rawk_cache=of_layer(self.k_low),
            beta_cache=None,
            out=q.new_empty(v.shape),
            query_start_loc=starts,
            ssm_state_indices=slots,
            replay_indices=rows,
            write_pos=self.write_pos,
            cache_base=self.base,
            is_flush=self.is_flush,
            max_cache_len=self.length,
            max_spec_len=self.nodes,
            scale=scale,
            use_qk_l2norm_in_kernel=True,
            null_block_id=NOBODY,
            launch_mode="verify",
        )

    def commit(
        self, states: torch.Tensor, *, slots: torch.Tensor, rows: torch.Tensor, accept_lens: torch.Tensor,
        track_slots: torch.Tensor, track: torch.Tensor,
    ) -> None:  # fmt: skip
        """FoldAtCommit.commit, but that states at slots stay behind until their ring is nearly full."""
        self._advance(
            write_pos=self.write_pos,
            cache_base=self.base,
            is_flush=self.is_flush,
            num_accepted=accept_lens,
            replay_indices=rows,
            max_cache_len=self.length,
            max_spec_len=self.nodes,
            fold_every_commit=states.dtype != torch.float32,
            null_block_id=NOBODY,
        )
        tracked = {"mamba_track_indices": track_slots, "mamba_steps_to_track": track}
        self._fold(states, slots=slots, rows=rows, accept_lens=accept_lens, **tracked)

    def settle(self, states: torch.Tensor, *, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Bring states at slots up to date."""
        self.is_flush[rows.long()] = 1
        self._fold(states, slots=slots, rows=rows, accept_lens=torch.zeros_like(slots))

    def _fold(self, states: torch.Tensor, *, slots: torch.Tensor, rows: torch.Tensor, **more: torch.Tensor) -> None:
        self._materialise(
            checkpoint_state=states,
            d_cache=self.d,
            k_cache=self.k,
            g_cache=self.g,
            d_residual_cache=self.d_low,
            k_residual_cache=self.k_low,
            state_batch_indices=slots,
            replay_indices=rows,
            write_pos=self.write_pos,
            cache_base=self.base,
            is_flush=self.is_flush,
            null_block_id=NOBODY,
            **more,
        )


def replayssm_kind() -> type[FoldAtCommit] | type[Ring]:
    """What the flag does in the SGLang on PYTHONPATH. Raises ImportError where there is none."""
    return {"0.5.17": FoldAtCommit, "0.5.23": Ring}[recurrent_module()[0]]


def scatter_windows(
    conv: StockConv, conv_states: torch.Tensor, windows: torch.Tensor, *, slots: torch.Tensor, last: torch.Tensor,
    track_slots: torch.Tensor, track: torch.Tensor,
) -> None:  # fmt: skip
    """The convolution's half of a commit under the flag: StockCommit.run without the states."""
    conv.scatter(conv_states, windows, slots, last)
    conv.scatter(conv_states, windows, track_slots, track)
