"""The flow of a verify with the project's own kernels, for every family and mode: when slots are settled, what a verify
prepares, what a commit is told.

A family adds the forward of its layers and nothing else; where draft nodes are kept meanwhile is the mode's business
(`state.store.DraftStore`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import MtpError
from ..state.pools import MtpMambaPool
from ..state.store import DraftStore, VerifyBatch


class TargetVerify:
    """Mixed in before a subclass of `MtpLinearBackend`.

    The pool owns the store. Which rows and how many draft nodes a verify has, which is what the commit that follows on
    the same stream refers to, lies with its metadata: SGLang may put metadata it has prepared before back in place
    without calling here.
    """

    linear_family: str
    if TYPE_CHECKING:
        req_to_token_pool: Any
        forward_metadata: Any

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)  # type: ignore[call-arg]
        self._pool, self.store = self._open_store(model_runner)

    def _open_store(self, model_runner: Any) -> tuple[MtpMambaPool, DraftStore]:
        pool = self.req_to_token_pool.mamba_pool
        if not isinstance(pool, MtpMambaPool) or not pool.max_nodes:
            raise MtpError(
                f"{type(self).__name__} needs a mamba pool of its own, but SGLang built {type(pool).__name__} for "
                f"{getattr(pool, 'max_nodes', 0)} draft nodes: a hook has no effect"
            )
        rows = self.req_to_token_pool.req_to_token.shape[0]
        if pool.request_rows < rows:
            raise MtpError(f"the mamba pool was built for {pool.request_rows} request rows, but SGLang has {rows}")
        # Under MLP sync SGLang pads a batch past the number of request rows, to a multiple of the attention group.
        return pool, pool.open_store(self.linear_family, model_runner, max_batch=2 * rows + 64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager forward."""
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        self._claim_slots(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self._prepare_verify()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a graph's replay (or capture), before it."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)  # type: ignore[misc]
        self._claim_slots(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Prepare what is recorded into the graph: the tree is read from the graph's own link buffers."""
        super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        if forward_batch.forward_mode.is_target_verify():
            self._prepare_verify()

    def _claim_slots(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Bring the batch's slots into the state its forward expects; remember what a verify's commit will need."""
        mode = forward_batch.forward_mode
        if not in_capture:
            self._pool.enter_forward()
        if mode.is_target_verify():
            self.forward_metadata.mtp_rows = forward_batch.req_pool_indices
            self.forward_metadata.mtp_lengths = forward_batch.seq_lens
            self.forward_metadata.mtp_nodes = forward_batch.spec_info.draft_token_num
            return
        if in_capture or mode.is_idle() or mode.is_draft_extend_v2():
            return
        # A decode, or an extend that continues a prefix, reads its slots with SGLang's kernels, and writes them: they
        # must hold all committed tokens. Slots that changed hands were cleared or copied into before.
        self._pool.settle_for_sglang(self.forward_metadata.mamba_cache_indices)
        if self.forward_metadata.mamba_track_indices is not None:
            self._pool.overwritten_by_sglang(self.forward_metadata.mamba_track_indices)

    def _prepare_verify(self) -> None:
        metadata = self.forward_metadata
        size = metadata.mamba_cache_indices.shape[0]
        self.store.prepare(self._batch(size), metadata.retrieve_next_token, metadata.retrieve_next_sibling)

    def commit_verify(
        self,
        last_correct: torch.Tensor,
        track_slots: torch.Tensor | None,
        steps_to_track: torch.Tensor | None,
    ) -> None:
        """Commit the verify that ran last: once, since its fold goes by the plan of that verify.

        ``last_correct`` [batch]: last accepted node of each row; ``steps_to_track`` [batch]: node whose state goes into
        ``track_slots`` [batch], or -1.
        """
        self._pool.forwards_run_here()  # a verify may have been prepared on a plan stream
        size = last_correct.shape[0]
        if size == 0:
            return
        self.store.commit(
            self._batch(size),
            last_correct=last_correct,
            track_slots=None if track_slots is None else track_slots[:size],
            steps_to_track=steps_to_track,
        )

    def _batch(self, size: int) -> VerifyBatch:
        """The first ``size`` rows of the running verify."""
        metadata = self.forward_metadata
        return VerifyBatch(
            slots=metadata.mamba_cache_indices[:size],
            rows=metadata.mtp_rows[:size],
            lengths=metadata.mtp_lengths[:size],
            nodes=metadata.mtp_nodes,
            chain=metadata.retrieve_next_token is None,
        )
