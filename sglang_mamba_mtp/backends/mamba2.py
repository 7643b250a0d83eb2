"""Mamba2: what every mode's backend adds to SGLang's `Mamba2AttnBackend`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from ..modes import MAMBA2
from ..tracking import logical_chunks
from .base import MtpLinearBackend, replaced


class Mamba2Backend(MtpLinearBackend, Mamba2AttnBackend):
    """`Mamba2AttnBackend` whose metadata preparation never reads from the device."""

    linear_family = MAMBA2

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """As the base does it, and the initial states and chunks of a prefill from host lengths too.

        SGLang asks the device whether any row has a prefix, and if so walks the chunk boundaries element by element.
        """
        prefixes, lens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        if prefixes is None or lens is None or len(prefixes) != len(lens):
            super().init_forward_metadata(forward_batch)
            return
        no_prefix = torch.zeros(len(lens), dtype=torch.int32)  # on the host: SGLang reads it
        with replaced(forward_batch, extend_prefix_lens=no_prefix):
            super().init_forward_metadata(forward_batch)
        mixed = self.forward_metadata.mixed_metadata
        if mixed is None:
            return
        chunks: dict[str, torch.Tensor] = {}
        if any(prefix > 0 for prefix in prefixes):
            names = ("chunk_indices", "chunk_offsets")
            chunks = dict(zip(names, self._to_device(logical_chunks(lens, mixed.chunk_size), torch.int32), strict=True))
        self.forward_metadata.mixed_metadata = dataclasses.replace(
            mixed,
            has_initial_states=forward_batch.extend_prefix_lens > 0,
            prep_initial_states=bool(chunks),
            **chunks,
        )
