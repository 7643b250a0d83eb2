"""The backends of the modes that verify with the project's own kernels, by family."""

from __future__ import annotations

from ..modes import GDN, MAMBA2
from .verify_gdn import VerifyGdn
from .verify_mamba2 import VerifyMamba2

BACKENDS: dict[str, type] = {GDN: VerifyGdn, MAMBA2: VerifyMamba2}
