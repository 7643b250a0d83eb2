"""Memory: what a mode needs beside the slots, and what SGLang's sizing is told about it.

SGLang sizes the mamba pool as if every running request held one recurrent state per draft node. Replay mode holds a
window per request row instead, slots mode one state fewer (`Holding`), and there are no more rows than slots for them:
with K slots, s bytes a slot, w what a row holds, R requests asked for and `ratio` slots a request,

    (K + 1) s + (min(R, K // ratio) + 1) w <= the share of memory that SGLang gives the mamba pool

is solved for the largest K; the one slot and the one row more are padding. The bytes saved become state slots, or KV
cache where the number of slots is fixed (by the user, or by --disable-radix-cache).

With --enable-int8-mamba-checkpoint SGLang adds two places in int8 for every slot, from the memory that it leaves free.
Places of more slots than it would have had are counted with the slots, so that no more is taken from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import config
from ..compat import startup
from ..families.table import FAMILIES
from .draft_slots import draft_slots
from .window import WindowShape

logger = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True)
class Sizing:
    """The outcome of one sizing. Bytes are for all layers of this rank.

    Attributes
        slots: state slots SGLang settled on.
        what: what request rows hold, for people.
        held: bytes of it, all rows'.
        stock_slots: slots SGLang would have settled on for its own verify.
        stock_states: bytes of per-draft states SGLang would have allocated.
    """

    slots: int
    what: str
    held: int
    stock_slots: int
    stock_states: int

    def message(self) -> str:
        """One log line."""
        return (
            f"mamba-mtp memory: {self.what} {self.held / GIB:.3f} GiB in place of {self.stock_states / GIB:.3f} GiB of "
            f"per-draft states, {(self.stock_states - self.held) / GIB:.3f} GiB saved; state slots {self.slots}, "
            f"{self.slots - self.stock_slots:+d} against SGLang's own verify"
        )


@dataclass(frozen=True)
class Holding:
    """What a mode holds for each request row beside the slots.

    Attributes
        what: its name, for people.
        bytes_per_row: bytes of all layers of this rank, given SGLang's configurator, the family, the longest draft and
            the page size to whose multiples states are rewound, 0 for not.
        remedy: what, lowered, makes it less, for messages.
    """

    what: str
    bytes_per_row: Callable[[Any, str, int, int], int]
    remedy: str


def _window_bytes(configurator: Any, family: str, nodes: int, rewinds_to: int) -> int:
    params = startup.cache_params(configurator.model_config)
    return WindowShape.of(
        FAMILIES[family],
        params,
        layers=len(params.layers),
        nodes=nodes,
        window=config.current().window,
        dtype=configurator.model_config.dtype,
        rewinds_to=rewinds_to,
    ).bytes_per_row()


def _draft_slot_bytes(configurator: Any, family: str, nodes: int, rewinds_to: int) -> int:
    return draft_slots(nodes) * int(startup.cache_params(configurator.model_config).mamba_cache_per_req)


WINDOWS = Holding("windows", _window_bytes, "--speculative-num-draft-tokens or --mamba-mtp-window")
DRAFT_SLOTS = Holding("draft slots", _draft_slot_bytes, "--speculative-num-draft-tokens")


#: The outcome for this process' target model, for the line it starts with.
last: Sizing | None = None


def size_with(
    holding: Holding,
    original: Callable[[Any, float], float],
    configurator: Any,
    total_rest_memory: float,
    family: str,
    rewinds_to: int,
) -> float:
    """Run SGLang's `_handle_max_mamba_cache` (GiB in, GiB left for the KV cache out) with ``holding`` in place of a
    state per draft node.

    Raises
        RuntimeError: there is not memory enough for one request.
    """
    nodes = startup.largest_draft(configurator.server_args)
    row = holding.bytes_per_row(configurator, family, nodes, rewinds_to)
    requests, arriving = startup.request_rows(configurator), startup.rows_in_transfer(configurator.server_args)
    automatic = startup.state_slots_are_automatic()
    ratio, stock_ratio = configurator._calculate_mamba_ratio(), startup.stock_slots_per_request(configurator)
    with _sized_without_speculation(configurator):
        rest = original(configurator, total_rest_memory)
    slots = stock_slots = startup.schedule().max_mamba_cache_size
    state = (total_rest_memory - rest) * GIB / (slots + 1)
    more_places = 0
    if automatic:
        share = startup.schedule().mamba_full_memory_ratio
        budget = total_rest_memory * GIB * share / (1 + share)
        drafts = state * nodes
        stock_slots = max(0, int((budget - state - drafts) // (state + drafts / stock_ratio)))
        places = startup.checkpoint_bytes_of_a_slot(configurator)
        slots = slots_that_fit(
            budget - row * arriving + places * (stock_slots + 1),
            state=state + places,
            row=row,
            requests=requests,
            ratio=ratio,
        )
        if slots < ratio:
            raise RuntimeError(
                f"mamba-mtp: {budget / GIB:.2f} GiB for recurrent states hold no request: a slot takes "
                f"{state / GIB:.3f} GiB, {ratio} of them and {row / GIB:.3f} GiB of {holding.what} are needed for one. "
                f"Raise --mem-fraction-static or --mamba-full-memory-ratio, or lower {holding.remedy}."
            )
        startup.set_state_slots(slots)
        more_places = places * max(0, slots - stock_slots)
    held = row * (min(requests, slots // ratio) + arriving + 1)
    stock_states = int(state * nodes * (min(requests, stock_slots // stock_ratio) + arriving + 1))
    global last
    last = Sizing(slots, holding.what, held, stock_slots, stock_states)
    logger.debug(last.message())
    return total_rest_memory - ((slots + 1) * state + held + more_places) / GIB


def slots_that_fit(budget: float, *, state: float, row: int, requests: int, ratio: int) -> int:
    """The largest K with (K + 1) state + (min(requests, K // ratio) + 1) row <= budget, in bytes; may be negative."""

    def fits(slots: int) -> bool:
        return (slots + 1) * state + (min(requests, slots // ratio) + 1) * row <= budget

    # both fit: with a row for every request, and with rows as if they came in fractions
    slots = max(int((budget - row * (requests + 1)) // state) - 1, int((budget - state - row) // (state + row / ratio)))
    while fits(slots + 1):
        slots += 1
    return slots


@contextlib.contextmanager
def _sized_without_speculation(configurator: Any) -> Iterator[None]:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = configurator.spec_algorithm
    configurator.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        yield
    finally:
        configurator.spec_algorithm = algorithm
