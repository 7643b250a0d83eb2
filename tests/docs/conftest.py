"""Makes launch/demo importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2] / "launch" / "demo"))
