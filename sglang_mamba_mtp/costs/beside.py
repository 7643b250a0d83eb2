"""What a rank takes beside its weights and pools, for which ``--mem-fraction-static`` must leave room.

CUDA graphs keep the logits of a captured batch several times over, so they grow with its requests, their nodes and the
vocabulary. The constants are those of three servers of SGLang 0.5.17 on an H200, whose graphs they give to 3 %
(tests/bench/results/2026-11-22-h200-graphs.txt); other versions and GPUs were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from .step import Drafting

#: Bytes for workspaces of attention, activations, and kernels that are loaded while serving.
WORKSPACES = 4 << 30


@dataclass(frozen=True)
class _Capture:
    """Bytes of graphs per entry of the vocabulary: for a node that is verified, a node that extends the draft, and a
    branch of a step that drafts."""

    verify: float
    extend: float
    draft: float


_ONE_RANK, _SEVERAL = _Capture(16.0, 10.9, 19.3), _Capture(26.7, 20.0, 29.3)


def graph_bytes(requests: int, drafting: Drafting, topk: int, vocabulary: int, ranks: int) -> float:
    """Bytes on a rank of the graphs of a server that captures batches of up to ``requests``.

    The first of a draft's forwards is the extend's. NGRAM drafts without a model, and DFLASH in one forward.
    """
    capture = _ONE_RANK if ranks == 1 else _SEVERAL
    branches = max(0, drafting.forwards - 1) * topk
    extended = drafting.nodes if drafting.forwards else 0
    entries = drafting.nodes * capture.verify + extended * capture.extend + branches * capture.draft
    return requests * vocabulary * entries
