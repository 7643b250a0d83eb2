"""Mamba2: SGLang's `Mamba2AttnBackend` with our metadata preparation, and with our verify."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

from ..names import MAMBA2
from ..tracking import logical_chunks
from .prefill import MtpLinearBackend, replaced
from .target_verify import TargetVerify


class Mamba2Backend(MtpLinearBackend, Mamba2AttnBackend):
    """`Mamba2AttnBackend` whose metadata preparation never reads from the device."""

    linear_family = MAMBA2

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """As the base does it, and the initial states and chunks of a prefill from host lengths too.

        SGLang asks the device whether any row has a prefix, and if so walks the chunk boundaries element by element.
        """
        prefixes, lens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        known = prefixes is not None and lens is not None and len(prefixes) == len(lens)
        if not known or not self.known_on_the_host(forward_batch):
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


class SnapshotMamba2(Mamba2Backend):
    """SGLang's Mamba2 verify, for models too that forget to ask for the one convolution it works with.

    Falcon-H1 does up to 0.5.21 and dies in its first verify; later it asks as we do here.
    """

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """SGLang's mixer, ``hidden_states`` [T, hidden] in and out."""
        triton = use_triton_causal_conv or forward_batch.forward_mode.is_target_verify()
        return super().forward(mixer, hidden_states, output, layer_id, forward_batch, mup_vector, triton)


class VerifyMamba2(TargetVerify, Mamba2Backend):
    """SGLang's prefill and decode, our verify.

    SGLang verifies inside its mixer, between the projections; a verify here takes the mixer's parts and calls its own
    convolution and state kernels between them, so no kernel of SGLang's ever sees a draft node.
    """

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """SGLang's mixer, or our verify: ``hidden_states`` [T, hidden] in, projected states of that shape out.

        ``output``, where given, is written too. T may exceed the tokens of the batch's nodes (padding).
        """
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward(
                mixer, hidden_states, output, layer_id, forward_batch, mup_vector, use_triton_causal_conv
            )
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        size = mixer.tp_size
        gate, x_B_C, dt = projected.split(
            [mixer.intermediate_size // size, mixer.conv_dim // size, mixer.num_heads // size], dim=-1
        )
        scored = self._score(mixer, self.req_to_token_pool.mamba2_layer_index(layer_id), x_B_C, dt)
        mixed, _ = mixer.out_proj(mixer.norm(scored, gate))
        if output is not None:
            output[: mixed.shape[0]].copy_(mixed)
        return mixed

    def _score(self, mixer: Any, index: int, x_B_C: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        """Convolution and recurrence of all nodes: ``x_B_C`` [T, conv dim], ``dt`` [T, heads] to [T, heads x head dim].

        Rows past the nodes are padding and come out as zeros.
        """
        batch = self._batch(self.forward_metadata.num_decodes)
        tokens = batch.size * batch.nodes
        heads, groups = mixer.num_heads // mixer.tp_size, mixer.n_groups // mixer.tp_size
        state = (groups, mixer.ssm_state_size)
        # before the convolution: a kernel between it and the verify would keep that one from starting early
        scored = x_B_C.new_empty(x_B_C.shape[0], heads * mixer.head_dim)
        scored[tokens:].zero_()  # the nodes' rows are all written by the kernel
        convolved = self.store.convolve(
            index,
            x_B_C[:tokens],
            batch,
            parts={"x": (heads, mixer.head_dim), "B": state, "C": state},
            weight=mixer.conv1d.weight.view(mixer.conv1d.weight.size(0), mixer.conv1d.weight.size(2)),
            bias=mixer.conv1d.bias,
            activation=mixer.activation,
        )
        self.store.score(
            index,
            batch,
            **convolved,
            dt=dt[:tokens],
            A=mixer.A,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            dt_softplus=True,
            out=scored[:tokens].view(tokens, heads, mixer.head_dim),
        )
        return scored
