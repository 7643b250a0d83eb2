"""Mode `replay`: a verify reads each checkpoint once and keeps the nodes' inputs; a commit records what was accepted.

`ReplayBackend` is what the families share: when slots are settled, what a verify prepares, what a commit does. A family
adds its own verify forward and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from mamba_mtp_kernels import conv1d, gdn

from .. import compat
from ..config import current_mode
from ..errors import MtpError
from ..families import Family, GdnFamily, window_layout
from ..modes import GDN
from ..pool import MtpMambaPool
from .gdn import GdnBackend

if TYPE_CHECKING:
    from ..window import Window


class ReplayBackend:
    """Mixed in before a subclass of `MtpLinearBackend`.

    The pool owns the window; an instance only remembers which rows and how many draft nodes its last verify had, which
    is what the commit that follows on the same stream refers to.
    """

    replay_family: Family
    if TYPE_CHECKING:
        req_to_token_pool: Any
        forward_metadata: Any

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)  # type: ignore[call-arg]
        self.window = self._open_window(model_runner)
        device = self.window.checkpoint.device
        self._convolve = conv1d.ops_for(device).conv1d_verify
        self._rows: torch.Tensor | None = None
        self._nodes = 0

    def _open_window(self, model_runner: Any) -> Window:
        pool = self.req_to_token_pool.mamba_pool
        if not isinstance(pool, MtpMambaPool) or pool.max_nodes is None:
            raise MtpError(
                f"replay mode needs a mamba pool of its own, but SGLang built {type(pool).__name__} for "
                f"{getattr(pool, 'max_nodes', None)} draft nodes: a hook has no effect"
            )
        rows = self.req_to_token_pool.req_to_token.shape[0]
        if pool.request_rows < rows:
            raise MtpError(f"the mamba pool was built for {pool.request_rows} request rows, but SGLang has {rows}")
        layout = window_layout(
            self.replay_family,
            compat.cache_params(model_runner.model_config),
            layers=pool.num_mamba_layers,
            nodes=pool.max_nodes,
            threshold=current_mode().config.window,
            dtype=model_runner.dtype,
        )
        fold = self.replay_family.fold(pool.mamba_cache.temporal.device)
        # Under MLP sync SGLang pads a batch past the number of request rows, to a multiple of the attention group.
        return pool.open_window(layout, fold=fold, max_batch=2 * rows + 64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager forward."""
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        self._claim_slots(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self._build_tree()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a graph's replay (or capture), before it."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)  # type: ignore[misc]
        self._claim_slots(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Prepare what is recorded into the graph: the tree is read from the graph's own link buffers."""
        super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        if forward_batch.forward_mode.is_target_verify():
            self._build_tree()

    def _claim_slots(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Bring the batch's slots into the state its forward expects; remember what a verify's commit will need."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            self._rows = forward_batch.req_pool_indices
            self._nodes = forward_batch.spec_info.draft_token_num
            return
        if in_capture or mode.is_idle() or mode.is_draft_extend_v2():
            return
        # A decode, or an extend that continues a prefix, reads its slots: they must hold all committed tokens. Slots
        # that changed hands were cleared or copied into before, which left nothing pending.
        self.window.settle(self.forward_metadata.mamba_cache_indices)
        if self.forward_metadata.mamba_track_indices is not None:
            self.window.discard(self.forward_metadata.mamba_track_indices)

    def _build_tree(self) -> None:
        metadata = self.forward_metadata
        self.window.build_tree(
            metadata.mamba_cache_indices.shape[0],
            self._nodes,
            metadata.retrieve_next_token,
            metadata.retrieve_next_sibling,
        )

    def commit_verify(
        self,
        last_correct: torch.Tensor,
        track_slots: torch.Tensor | None,
        steps_to_track: torch.Tensor | None,
    ) -> None:
        """Commit the verify that ran last.

        ``last_correct`` [batch]: last accepted node of each row; ``steps_to_track`` [batch]: node whose state goes into
        ``track_slots`` [batch], or -1.
        """
        batch = last_correct.shape[0]
        if batch == 0:
            return
        assert self._rows is not None, "a commit without a verify"
        self.window.commit(
            slots=self.forward_metadata.mamba_cache_indices[:batch],
            rows=self._rows[:batch],
            nodes=self._nodes,
            last_correct=last_correct,
            track_slots=None if track_slots is None else track_slots[:batch],
            steps_to_track=steps_to_track,
        )


class ReplayGdn(ReplayBackend, GdnBackend):
    """GDN in replay mode."""

    replay_family = GdnFamily

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._verify = gdn.ops_for(self.window.checkpoint.device).verify

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """SGLang's prefill, or our verify.

        ``mixed_qkv`` [T, 2 H K + HV V] before the convolution, ``a`` and ``b`` [T, HV]; returns [1, T, HV, V].
        """
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        index = self.req_to_token_pool.mamba2_layer_index(layer.layer_id)
        nodes = self._nodes
        batch = mixed_qkv.shape[0] // nodes
        slots = self.forward_metadata.mamba_cache_indices[:batch]
        assert self._rows is not None
        rows = self._rows[:batch]
        mixed_qkv = self._convolve(
            mixed_qkv,
            conv_states=self.window.conv_states[index],
            weight=layer.conv_weights,
            bias=layer.bias,
            activation=layer.activation,
            slots=slots,
            rows=rows,
            parents=self.window.parents(batch, nodes),
            conv_inputs=self.window.layer_conv_inputs(index, nodes),
        )
        q, k, v = mixed_qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        out = self._verify(
            q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
            k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
            v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
            a,
            b,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            scale=layer.head_k_dim**-0.5,
            checkpoint=self.window.checkpoint[index],
            slots=slots,
            rows=rows,
            pending=self.window.pending,
            order=self.window.order,
            **self.window.layer(index),
            ancestors=self.window.ancestors(batch, nodes),
            fold_threshold=self.window.layout.threshold,
        )
        return out.unsqueeze(0)


BACKENDS: dict[str, type] = {GDN: ReplayGdn}
