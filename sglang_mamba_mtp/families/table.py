"""The families there are."""

from __future__ import annotations

from ..names import GDN, MAMBA2
from .base import Family
from .gdn import GdnFamily
from .mamba2 import Mamba2Family

FAMILIES: dict[str, Family] = {GDN: GdnFamily(), MAMBA2: Mamba2Family()}
