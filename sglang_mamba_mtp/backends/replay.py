"""Mode `replay`: the backend of each family."""

from __future__ import annotations

from ..modes import GDN, MAMBA2
from .replay_gdn import ReplayGdn
from .replay_mamba2 import ReplayMamba2

BACKENDS: dict[str, type] = {GDN: ReplayGdn, MAMBA2: ReplayMamba2}
