"""What the families share in mode `replay`: when slots are settled, what a verify prepares, what a commit does.

A verify reads each checkpoint once and keeps the nodes' inputs; a commit records which of them were accepted. A family
adds its own verify forward and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from mamba_mtp_kernels import conv1d

from .. import compat
from ..config import current_mode
from ..errors import MtpError
from ..families import FAMILIES, window_layout
from ..pool import MtpMambaPool

if TYPE_CHECKING:
    from ..window import Window


class ReplayBackend:
    """Mixed in before a subclass of `MtpLinearBackend`.

    The pool owns the window; an instance only remembers which rows and how many draft nodes its last verify had, which
    is what the commit that follows on the same stream refers to.
    """

    linear_family: str
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
        family = FAMILIES[self.linear_family]
        layout = window_layout(
            family,
            compat.cache_params(model_runner.model_config),
            layers=pool.num_mamba_layers,
            nodes=pool.max_nodes,
            threshold=current_mode().config.window,
            dtype=model_runner.dtype,
        )
        fold = family.fold(pool.mamba_cache.temporal.device, model_runner.model)
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

    def _convolve_nodes(
        self, index: int, x: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> torch.Tensor:
        """The convolution of layer ``index`` over all draft nodes: ``x`` [T, dim] in and out, its inputs kept."""
        slots, rows = self._verified(x.shape[0])
        return self._convolve(
            x,
            conv_states=self.window.conv_states[index],
            weight=weight,
            bias=bias,
            activation=activation,
            slots=slots,
            rows=rows,
            parents=self.window.parents(slots.shape[0], self._nodes),
            conv_inputs=self.window.layer_conv_inputs(index, self._nodes),
        )

    def _replay_arguments(self, index: int, tokens: int) -> dict[str, Any]:
        """What the verify kernels of every family take besides the nodes' inputs, for layer ``index``."""
        slots, rows = self._verified(tokens)
        return {
            "checkpoint": self.window.checkpoint[index],
            "slots": slots,
            "rows": rows,
            "pending": self.window.pending,
            "order": self.window.order,
            **self.window.layer(index),
            "ancestors": self.window.ancestors(slots.shape[0], self._nodes),
            "fold_threshold": self.window.layout.threshold,
        }

    def _verified(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and request rows of the running verify."""
        batch = tokens // self._nodes
        assert self._rows is not None, "a verify without metadata"
        return self.forward_metadata.mamba_cache_indices[:batch], self._rows[:batch]
