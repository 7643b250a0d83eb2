"""Names that more than one room uses."""

from __future__ import annotations

from typing import Final

#: The linear-attention families that have backends here (`compat.startup.linear_family` returns one of them).
GDN: Final = "gdn"
MAMBA2: Final = "mamba2"

#: The modes, values of ``--mamba-mtp-mode``.
REPLAY: Final = "replay"
SLOTS: Final = "slots"
SNAPSHOT: Final = "snapshot"
OFF: Final = "off"

#: Who decides what the radix cache is given of a request's states: ``--mamba-mtp-radix``.
REWIND, SGLANG = "rewind", "sglang"
