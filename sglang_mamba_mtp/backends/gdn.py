"""GDN: SGLang's `GDNAttnBackend` with our metadata preparation, and with our verify."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import maybe_build_flashinfer_checkpoint_plan

from ..names import GDN
from ..tracking import HostTracking
from .prefill import MtpLinearBackend
from .target_verify import TargetVerify


class GdnBackend(MtpLinearBackend, GDNAttnBackend):
    """`GDNAttnBackend` whose metadata preparation never reads from the device."""

    linear_family = GDN

    def _add_tracking(self, forward_batch: Any, tracking: HostTracking) -> None:
        super()._add_tracking(forward_batch, tracking)
        if self.kernel_dispatcher.extend_uses_state_checkpoints:  # FlashInfer's prefill numbers its states otherwise
            maybe_build_flashinfer_checkpoint_plan(forward_batch, self.forward_metadata, self.device)


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
        mixed_qkv = self.store.convolve(
            index, mixed_qkv, batch, weight=layer.conv_weights, bias=layer.bias, activation=layer.activation
        )
        q, k, v = mixed_qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        out = self.store.score(
            index,
            batch,
            q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
            k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
            v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
            a,
            b,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            scale=layer.head_k_dim**-0.5,
        )
        return out.unsqueeze(0)
