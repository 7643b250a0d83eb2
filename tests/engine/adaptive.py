"""Adaptive speculation: SGLang changes the number of drafts, N - 1, while requests run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .spec import Result

CONFIG = {
    "ema_alpha": 0.7,
    "update_interval": 1,
    "warmup_batches": 0,
    "down_hysteresis": 0.0,
    "1": {"candidate_steps": [0, 1, 3]},
    "2": {"candidate_steps": [0, 2, 5]},
    "4": {"candidate_steps": [0]},
    "5": {"candidate_steps": [1, 4]},
}
"""Candidates per batch size, and a mean that follows the last step: N changes all the time, between 1 and 6."""


def settings(folder: str | Path) -> dict[str, Any]:
    """ServerArgs fields that switch it on; CONFIG is written into ``folder``. NEXTN chains only (SGLang)."""
    path = Path(folder) / "adaptive.json"
    path.write_text(json.dumps(CONFIG))
    return {"speculative_adaptive": True, "speculative_adaptive_config": str(path)}


def node_counts(result: Result) -> list[int]:
    """The N of every switch, in order, from the engine's log."""
    return [int(n) for n in re.findall(r"Switch adaptive runtime state:.*?draft_tokens \d+ -> (\d+)", result.log)]
