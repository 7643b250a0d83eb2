"""What the benchmarks of verify share: head sizes, draft trees, the cycle of a window, errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from graph_timing import import_kernels

import_kernels()

from mamba_mtp_kernels.common import ops_for  # noqa: E402
from mamba_mtp_kernels.common.operands import Rows, Window, fold_at_once, plan_width  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ROTATED_BYTES = 200e6
"""States a timing goes through before it meets one again: four times an H100's L2 cache."""

CONV_WIDTH = 4


@dataclass(frozen=True)
class GdnShape:
    """Heads of one GDN layer (Qwen3-Next's) and the dtype of its state."""

    H: int = 16
    HV: int = 32
    K: int = 128
    V: int = 128
    state: str = "fp32"

    @property
    def temporal(self) -> tuple[int, int, int]:
        return self.HV, self.V, self.K

    @property
    def conv_dim(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def state_bytes(self) -> int:
        return self.HV * self.V * self.K * DTYPES[self.state].itemsize


@dataclass(frozen=True)
class Mamba2Shape:
    """Heads of one Mamba2 layer (Nemotron-Nano-9B-v2's) and the dtype of its state."""

    nheads: int = 128
    headdim: int = 80
    dstate: int = 128
    ngroups: int = 8
    state: str = "fp32"

    @property
    def temporal(self) -> tuple[int, int, int]:
        return self.nheads, self.headdim, self.dstate

    @property
    def conv_dim(self) -> int:
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate

    @property
    def state_bytes(self) -> int:
        return self.nheads * self.headdim * self.dstate * DTYPES[self.state].itemsize


def planned(rows: Rows, window: Window, nodes: int, ordered: bool = True) -> Rows:
    """The rows with what is made once per forward, for all layers: the plan of their verify of this many nodes and, if
    ordered, the order in which it starts them."""
    device = rows.slots.device
    plan = torch.empty(rows.batch, plan_width(nodes, window.fold_threshold), dtype=torch.int32, device=device)
    schedule = torch.empty(rows.batch, dtype=torch.int32, device=device) if ordered else None
    rows = replace(rows, plan=plan, schedule=schedule)
    ops_for(device).plan_rows(window, rows, nodes=nodes)
    return rows


def window_cycle(accept: int, threshold: int, stays: int = 0, nodes: int = 1) -> list[int]:
    """Pending counts that the verifies of one window cycle meet, `accept` tokens a step; the last one folds.

    stays: tokens that a fold leaves, those of the newest step where states are rewound. nodes: of a verify.
    """
    counts = [accept]
    while True:
        before = counts[-1]
        folds = min(before - stays, fold_at_once(nodes)) if before > threshold else 0
        after = before - folds + accept
        if after in counts:
            cycle = counts[counts.index(after) :]
            last = max(range(len(cycle)), key=lambda k: (cycle[k] > threshold, k))
            return cycle[last + 1 :] + cycle[: last + 1]
        counts.append(after)


TRACK_INTERVAL = 256
"""SGLang's default --mamba-track-interval: tokens of a request between two states that the radix cache gets."""


def boundaries(batch: int, accept: int) -> tuple[int, float]:
    """(n, share): where every row accepts this many tokens a step, a step passes n track boundaries, and n + 1 in this
    share of the steps."""
    passed = batch * accept / TRACK_INTERVAL
    return int(passed), passed % 1


def apart(batch: int, rows: int) -> list[int]:
    """This many rows of a batch, evenly apart."""
    return [row * batch // rows for row in range(rows)]


def tree_parents(kind: str, nodes: int) -> list[int]:
    """Parent of every node, -1 for the root.

    chain; tree: as EAGLE with topk 2 draws it, two branches that fork again at every second level; comb: a path of
    nodes/2 below the root with a sibling leaf at every level, so that a path of nodes/2 + 1 can be accepted.
    """
    if kind == "chain":
        return list(range(-1, nodes - 1))
    if kind == "comb":
        return [-1] + [max(0, (node - 1) // 2 * 2 - 1) for node in range(1, nodes)]
    return ([-1, 0, 0] + [node - 2 if node % 4 in (1, 2) else node - 3 for node in range(3, nodes)])[:nodes]


def ancestor_masks(parents: list[int]) -> list[int]:
    """Strict ancestors of every node as bits."""
    masks = [0] * len(parents)
    for node in range(1, len(parents)):
        masks[node] = masks[parents[node]] | 1 << parents[node]
    return masks


def tree_links(parents: list[int]) -> tuple[list[int], list[int]]:
    """retrieve_next_token and retrieve_next_sibling as SGLang hands them, -1 for none."""
    first_child, sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        sibling[node] = first_child[parents[node]]
        first_child[parents[node]] = node
    return first_child, sibling


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; infinite where anything is not finite."""
    error = (actual.double() - expected).norm() / expected.norm()
    return float(error) if bool(torch.isfinite(actual).all()) else float("inf")


def sets_for(bytes_per_set: float, at_least: int = 2) -> int:
    """Independent batches that together outgrow the L2 cache."""
    return max(at_least, -(-int(ROTATED_BYTES) // int(bytes_per_set)))
