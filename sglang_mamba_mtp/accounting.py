"""Memory: what replay mode needs beside the slots, and what SGLang's sizing is told about it.

SGLang sizes the mamba pool as if every running request held one recurrent state per draft node. Replay mode holds a
window per request row instead: SGLang is asked to size as without speculation, with the windows' bytes taken off first,
and the bytes saved become state slots (or KV cache, where the user fixed the number of slots).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import compat
from .families import FAMILIES, window_layout

logger = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True)
class Sizing:
    """The outcome of one sizing. Bytes are for all layers of this rank.

    Attributes
        slots: state slots SGLang settled on.
        windows: bytes of all request rows' windows.
        stock_slots: slots SGLang would have settled on for its own verify.
        stock_states: bytes of per-draft states SGLang would have allocated.
    """

    slots: int
    windows: int
    stock_slots: int
    stock_states: int

    def message(self) -> str:
        """One log line."""
        return (
            f"mamba-mtp memory: windows {self.windows / GIB:.3f} GiB in place of {self.stock_states / GIB:.3f} GiB of "
            f"per-draft states, {(self.stock_states - self.windows) / GIB:.3f} GiB saved; state slots {self.slots}, "
            f"{self.slots - self.stock_slots:+d} against SGLang's own verify"
        )


def size_with_windows(
    original: Callable[[Any, float], float], configurator: Any, total_rest_memory: float, *, family: str, threshold: int
) -> float:
    """Run SGLang's `_handle_max_mamba_cache` (GiB in, GiB left for the KV cache out) with windows in place of
    states."""
    params = compat.cache_params(configurator.model_config)
    layout = window_layout(
        FAMILIES[family],
        params,
        layers=len(params.layers),
        nodes=compat.largest_draft(configurator.server_args),
        threshold=threshold,
        dtype=configurator.model_config.dtype,
    )
    rows = compat.request_rows(configurator)
    windows = layout.bytes_per_row() * (rows + 1)
    fixed = compat.schedule().max_mamba_cache_size is not None
    with _sized_without_speculation(configurator):
        rest = original(configurator, total_rest_memory - windows / GIB)
    slots = compat.schedule().max_mamba_cache_size
    state, ratio = params.mamba_cache_per_req, configurator._calculate_mamba_ratio()
    stock_slots = slots
    if not fixed:
        share = compat.schedule().mamba_full_memory_ratio
        budget = total_rest_memory * GIB * share / (1 + share)
        stock_slots = max(0, int((budget - state * (1 + layout.nodes)) // (state * (1 + layout.nodes / ratio))))
    stock_states = state * layout.nodes * (min(rows, stock_slots // ratio) + 1)
    logger.info(Sizing(slots, windows, stock_slots, stock_states).message())
    return rest


@contextlib.contextmanager
def _sized_without_speculation(configurator: Any) -> Iterator[None]:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = configurator.spec_algorithm
    configurator.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        yield
    finally:
        configurator.spec_algorithm = algorithm
