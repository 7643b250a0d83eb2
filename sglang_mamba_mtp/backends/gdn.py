"""GDN: SGLang's `GDNAttnBackend` with our metadata preparation, and with our verify."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

from ..compat import batches
from ..names import GDN
from ..tracking import HostTracking, plan_checkpoints
from .prefill import MtpLinearBackend
from .target_verify import TargetVerify


class GdnBackend(MtpLinearBackend, GDNAttnBackend):
    """`GDNAttnBackend` whose metadata preparation never reads from the device."""

    linear_family = GDN

    def _add_tracking(self, forward_batch: Any, tracking: HostTracking) -> None:
        super()._add_tracking(forward_batch, tracking)
        # FlashInfer's prefill numbers its states otherwise; without a source in them SGLang asks it for none.
        if self.kernel_dispatcher.extend_uses_state_checkpoints and self.forward_metadata.track_ssm_h_src.numel():
            self._plan_checkpoints(forward_batch, tracking)

    def _plan_checkpoints(self, forward_batch: Any, tracking: HostTracking) -> None:
        """What SGLang's `maybe_build_flashinfer_checkpoint_plan` adds, without its four copies from the device."""
        every = batches.snapshot_size()
        plan = plan_checkpoints(
            tracking, forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, every=every
        )
        metadata, sources = self.forward_metadata, len(plan.sources)
        if sources != metadata.track_ssm_h_dst.shape[0]:
            raise ValueError(f"{metadata.track_ssm_h_dst.shape[0]} states are tracked, FlashInfer leaves {sources}")
        # The kernel's own argument first: it may want it aligned.
        index = self._to_device(plan.starts + plan.sources, torch.int64)
        metadata.state_checkpoint_cu_starts = index[: len(plan.starts)]
        metadata.track_ssm_h_src = index[len(plan.starts) :]
        metadata.num_state_checkpoints = plan.starts[-1]
        metadata.state_checkpoint_every_n_tokens = every


class VerifyGdn(TargetVerify, GdnBackend):
    """SGLang's prefill and decode, our verify."""

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """SGLang's prefill, or our verify.

        ``mixed_qkv`` [T, 2 H K + HV V] before the convolution, ``a`` and ``b`` [T, HV]; returns [1, T, HV, V].
        """
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        index = self.req_to_token_pool.mamba2_layer_index(layer.layer_id)
        batch = self._batch(mixed_qkv.shape[0] // self.forward_metadata.mtp_nodes)
        convolved = self.store.convolve(
            index,
            mixed_qkv,
            batch,
            parts={
                "q": (layer.num_q_heads, layer.head_q_dim),
                "k": (layer.num_k_heads, layer.head_k_dim),
                "v": (layer.num_v_heads, layer.head_v_dim),
            },
            weight=layer.conv_weights,
            bias=layer.bias,
            activation=layer.activation,
        )
        out = self.store.score(
            index,
            batch,
            **convolved,
            a=a,
            b=b,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            scale=layer.head_k_dim**-0.5,
        )
        return out.unsqueeze(0)
