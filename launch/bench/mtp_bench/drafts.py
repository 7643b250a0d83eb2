"""What a server drafts: ``chain4`` is four nodes in a row, ``tree8`` eight nodes; ``tree8x4`` has four branches a step.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ALGORITHMS = ("NEXTN", "STANDALONE", "EAGLE", "EAGLE3", "NGRAM")
#: Algorithms that draft with a model of their own.
WITH_DRAFT_MODEL = ("STANDALONE", "EAGLE", "EAGLE3")
_SPELLING = re.compile(r"(chain|tree)(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Draft:
    """One shape of drafts. nodes: verified a step, root included; steps: draft forwards; topk: branches a step."""

    name: str
    nodes: int
    steps: int
    topk: int

    @property
    def chain(self) -> bool:
        """Is every node the only child of the one before it?"""
        return self.topk == 1

    @property
    def longest(self) -> int:
        """Most tokens a step can accept, the target's own included."""
        return self.steps + 1

    def flags(self, algorithm: str, draft_model: str | None) -> list[str]:
        """The flags of ``sglang.launch_server``."""
        flags = ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", str(self.nodes)]
        if draft_model is not None:
            flags += ["--speculative-draft-model-path", draft_model]
        if algorithm == "NGRAM":
            return [*flags, "--speculative-ngram-max-bfs-breadth", str(self.topk)]
        return [*flags, "--speculative-num-steps", str(self.steps), "--speculative-eagle-topk", str(self.topk)]


def parse(text: str) -> Draft:
    """Read ``chainN``, ``treeN`` or ``treeNxTOPK``.

    A tree of N nodes takes log2(N) steps, so that it is deeper than it is wide, and four branches (two below 8 nodes).

    Raises
        ValueError: it is none of these, or that tree cannot be drafted.
    """
    found = _SPELLING.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not chainN, treeN or treeNxTOPK")
    kind, nodes, topk = found[1], int(found[2]), found[3]
    if nodes < 2:
        raise ValueError(f"{text}: at least 2 nodes, the root and one draft")
    if kind == "chain":
        if topk is not None:
            raise ValueError(f"{text}: a chain has no branches")
        return Draft(text, nodes, nodes - 1, 1)
    branches = int(topk) if topk is not None else (2 if nodes < 8 else 4)
    if branches < 2:
        raise ValueError(f"{text}: a tree has at least 2 branches a step")
    steps = max(2, (nodes - 1).bit_length())
    if nodes - 1 > branches + (steps - 1) * branches**2:
        raise ValueError(f"{text}: {steps} steps of {branches} branches draft fewer than {nodes - 1} nodes")
    return Draft(text, nodes, steps, branches)
