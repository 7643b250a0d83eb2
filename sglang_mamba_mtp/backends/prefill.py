"""What both families' backends share, whatever the mode: metadata without device synchronisations, tree checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from ..compat import batches
from ..errors import MtpError
from ..state.upload import upload
from ..tracking import FLAT_GRID, HostTracking, TrackPlan, plan_tracking


@contextlib.contextmanager
def replaced(record: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``record`` for the duration; names it does not have are left out."""
    known = {name: getattr(record, name) for name in values if hasattr(record, name)}
    for name in known:
        setattr(record, name, values[name])
    try:
        yield
    finally:
        for name, value in known.items():
            setattr(record, name, value)


class MtpLinearBackend:
    """Mixed in before SGLang's `GDNAttnBackend` or `Mamba2AttnBackend`.

    SGLang may build several instances over one pool, so an instance holds nothing that outlives a forward.

    Attributes
        linear_family: which of SGLang's backends this one extends (`names.GDN`, `names.MAMBA2`).
    """

    linear_family: ClassVar[str]
    if TYPE_CHECKING:
        topk: int
        device: Any
        conv_states_shape: Any
        forward_metadata: Any
        retrieve_next_token_list: list[torch.Tensor]
        retrieve_next_sibling_list: list[torch.Tensor]

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)  # type: ignore[call-arg]
        # topk > 1 is how SGLang says "the drafts are trees": it decides whether the links reach conv and state.
        if model_runner.spec_algorithm.is_ngram() and self.topk <= 1:
            raise MtpError(
                f"NGRAM drafts trees, but this backend was given topk {self.topk}, which means chains: "
                f"conv and state would ignore the tree's links (hook on _handle_ngram not effective?)"
            )

    def _forward_metadata(self, forward_batch: Any) -> Any:
        """SGLang's, with links for all rows of a verify, and in a prefill with slot 0, which is nobody's, for rows that
        have none.

        Under data-parallel attention MLP sync pads a batch, but not the links that its drafts came with: SGLang's own
        verify would read on behind them. And a rank without requests prefills one that is made up, up to 0.5.20 at slot
        -1, whose state SGLang's Mamba2 mixer, and GDN's prefills by FlashInfer (SM90) and CuteDSL, put into the last
        slot.
        """
        metadata = super()._forward_metadata(forward_batch)  # type: ignore[misc]
        mode, slots = forward_batch.forward_mode, metadata.mamba_cache_indices
        if mode.is_target_verify():
            for name in ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"):
                setattr(metadata, name, _padded(getattr(metadata, name), slots.shape[0]))
        elif mode.is_extend():
            metadata.mamba_cache_indices = slots.clamp(min=0)
        return metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager forward without reading from the device.

        SGLang's own preparation runs on a batch in which nothing seems to be tracked; what is tracked is then added
        from host data. Batches without host data are left to SGLang.
        """
        if not self.known_on_the_host(forward_batch):
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
            return
        tracking = self._tracking(forward_batch)
        with replaced(forward_batch, **dict.fromkeys(batches.TRACKING_ATTRIBUTES)):
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        if tracking is not None and any(tracking.mask):
            self._add_tracking(forward_batch, tracking)

    @staticmethod
    def _tracks(forward_batch: Any) -> bool:
        mode = forward_batch.forward_mode
        return mode.is_extend() and not mode.is_target_verify() and forward_batch.mamba_track_mask is not None

    def _tracking(self, forward_batch: Any) -> HostTracking | None:
        return batches.host_tracking(forward_batch) if self._tracks(forward_batch) else None

    def known_on_the_host(self, forward_batch: Any) -> bool:
        """Whether the host knows what this batch tracks, if anything: lengths, prefixes and which rows.

        It does in all that the schedulers of the supported versions send.
        """
        if not self._tracks(forward_batch):
            return True
        tracking = self._tracking(forward_batch)
        lens, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        return (
            tracking is not None
            and lens is not None
            and prefixes is not None
            and len(tracking.mask) <= len(lens) == len(prefixes)
        )

    def _add_tracking(self, forward_batch: Any, tracking: HostTracking) -> None:
        """Add what SGLang computes for a prefill with tracked rows to ``self.forward_metadata``."""
        conv_window = self.conv_states_shape[-1]
        lens = list(forward_batch.extend_seq_lens_cpu)
        plan = plan_tracking(
            tracking,
            lens,
            list(forward_batch.extend_prefix_lens_cpu),
            chunk_size=batches.track_chunk_size(self),
            snapshot_size=batches.snapshot_size(),
            boundary_states=batches.boundary_states(self.linear_family),
            conv_window=conv_window,
        )
        index = self._upload(plan, sum(lens), conv_window)
        slots = self.forward_metadata.mamba_cache_indices
        track_slots = forward_batch.mamba_track_indices
        values = {
            "has_mamba_track_mask": True,
            "mamba_track_mask_indices": index["rows"],
            "conv_states_mask_indices": track_slots.index_select(0, index["rows"]),
            "track_conv_indices": index["conv"].view(-1, conv_window),
            "track_ssm_h_src": index["h_src"],
            "track_ssm_h_dst": track_slots.index_select(0, index["h_rows"]),
            "track_ssm_h_batch_src": index["unaligned_rows"],
            "track_ssm_final_src": slots.index_select(0, index["final_rows"]),
            "track_ssm_final_dst": track_slots.index_select(0, index["final_rows"]),
            "track_chunk_idx": index["chunks"].to(torch.int32),
        }
        if batches.boundary_states(self.linear_family) == FLAT_GRID:
            values |= {
                "track_ssm_seq_idx": index["recompute_rows"],
                "track_ssm_end_locs": index["recompute_ends"],
                "track_ssm_recompute_dst": track_slots.index_select(0, index["recompute_rows"]),
            }
        known = {known.name for known in fields(self.forward_metadata)}
        for name, value in values.items():
            if name in known:
                setattr(self.forward_metadata, name, value)

    def _upload(self, plan: TrackPlan, tokens: int, conv_window: int) -> dict[str, torch.Tensor]:
        """All index lists in one copy to the device, as int64 views by name."""
        lists = {entry.name: getattr(plan, entry.name) for entry in fields(plan) if entry.name != "conv_starts"}
        last = tokens - 1
        lists["conv"] = [
            min(max(position, 0), last) for start in plan.conv_starts for position in range(start, start + conv_window)
        ]
        flat = self._to_device(list(chain.from_iterable(lists.values())), torch.int64)
        ends = list(accumulate(len(values) for values in lists.values()))
        return {name: flat[end - len(values) : end] for (name, values), end in zip(lists.items(), ends, strict=True)}

    def _to_device(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """``values`` (nested lists of ints) on the device, without waiting for it."""
        return upload(values, dtype, self.device)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Copy the tree links the draft has produced by now into the captured graph's buffers.

        SGLang does so for EAGLE trees only; links are links whoever drafted them.
        """
        super().update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)  # type: ignore[misc]
        links = getattr(spec_info, "retrieve_next_token", None)
        if isinstance(spec_info, EagleVerifyInput) or self.topk <= 1 or cuda_graph_bs is None or links is None:
            return
        self.retrieve_next_token_list[cuda_graph_bs - 1][: links.shape[0]].copy_(links)
        self.retrieve_next_sibling_list[cuda_graph_bs - 1][: links.shape[0]].copy_(spec_info.retrieve_next_sibling)


def _padded(links: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """Links of ``size`` rows, of those beyond the given ones none."""
    if links is None or links.shape[0] >= size:
        return links
    return torch.nn.functional.pad(links, (0, 0, 0, size - links.shape[0]), value=-1)
