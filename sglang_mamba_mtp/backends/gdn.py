"""GDN: what every mode's backend adds to SGLang's `GDNAttnBackend`."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import maybe_build_flashinfer_checkpoint_plan

from .. import compat
from ..modes import GDN
from .base import MtpLinearBackend


class GdnBackend(MtpLinearBackend, GDNAttnBackend):
    """`GDNAttnBackend` whose metadata preparation never reads from the device."""

    linear_family = GDN

    def _add_tracking(self, forward_batch: Any, tracking: compat.HostTracking) -> None:
        super()._add_tracking(forward_batch, tracking)
        if self.kernel_dispatcher.extend_uses_state_checkpoints:  # FlashInfer's prefill numbers its states otherwise
            maybe_build_flashinfer_checkpoint_plan(forward_batch, self.forward_metadata, self.device)
