"""What each mode is made of: one record a mode, nothing else decides by mode.

The records name classes that extend SGLang's, so importing this imports SGLang's model code; what the command line
needs to know of modes is in `config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import config
from .backends.gdn import GdnBackend, VerifyGdn
from .backends.mamba2 import SnapshotMamba2, VerifyMamba2
from .guards import COMMON, OWN_VERIFY, SGLANGS_VERIFY, Decline
from .names import GDN, MAMBA2, OFF, REPLAY, SLOTS, SNAPSHOT
from .state import sizing
from .state.pools import DraftSlotPool, MtpMambaPool, ReplayPool, copies_per_draft

OWN_BACKENDS: Mapping[str, type] = {GDN: VerifyGdn, MAMBA2: VerifyMamba2}


@dataclass(frozen=True)
class Mode:
    """How target verify treats the recurrent state. A field left out is what SGLang does.

    Attributes
        name: value of ``--mamba-mtp-mode``.
        backends: by family, the linear-attention backend, a subclass of SGLang's.
        pool: the mamba pool, or None for SGLang's.
        holds: what it holds for each request row beside the slots, for `sizing.size_with`; None where SGLang's own
            sizing is right.
        rewinds: whether states of requests can be rewound (`state.rewind`), with a pool of its own.
        guards: what the mode declines to run with.
        speculative_bytes: what a mamba pool holds for speculation, in bytes by what they hold.
    """

    name: str
    backends: Mapping[str, type] = field(default_factory=dict)
    pool: type[MtpMambaPool] | None = None
    holds: sizing.Holding | None = None
    rewinds: bool = False
    guards: tuple[Decline, ...] = ()
    speculative_bytes: Callable[[Any], dict[str, int]] = lambda pool: {}

    @property
    def stock(self) -> bool:
        """Whether SGLang serves unchanged."""
        return not self.backends


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            REPLAY,
            backends=OWN_BACKENDS,
            pool=ReplayPool,
            holds=sizing.WINDOWS,
            rewinds=True,
            guards=COMMON + OWN_VERIFY,
            speculative_bytes=lambda pool: {sizing.WINDOWS.what: pool.speculative_bytes},
        ),
        Mode(
            SLOTS,
            backends=OWN_BACKENDS,
            pool=DraftSlotPool,
            holds=sizing.DRAFT_SLOTS,
            guards=COMMON + OWN_VERIFY,
            speculative_bytes=lambda pool: {sizing.DRAFT_SLOTS.what: pool.speculative_bytes},
        ),
        Mode(
            SNAPSHOT,
            backends={GDN: GdnBackend, MAMBA2: SnapshotMamba2},
            guards=COMMON + SGLANGS_VERIFY,
            speculative_bytes=copies_per_draft,
        ),
        Mode(OFF),
    )
}


def current() -> Mode:
    """The mode of this process, from its environment."""
    return MODES[config.current().mode]
