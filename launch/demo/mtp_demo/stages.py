"""What a starting server is doing, read from its log."""

from __future__ import annotations

import re

FIRST = "importing SGLang"

#: (what its log says when the stage begins, the stage), in the order of a start; both SGLang versions say the same.
STAGES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), stage)
    for pattern, stage in (
        (r"server_args=", "starting its processes"),
        (r"Load weight begin", "loading weights"),
        (r"Load weight end", "allocating state slots and KV cache"),
        (r"[Cc]apture .*graph.* begin", "capturing CUDA graphs"),
        (r"Uvicorn running|Application startup complete", "answering a first request"),
    )
)


def stage(log: str) -> str:
    """The furthest stage that ``log`` tells of. A draft model's loading does not lead back."""
    return next((name for pattern, name in reversed(STAGES) if pattern.search(log)), FIRST)
