"""How many rows of a batch fold in each step, where all requests start at once: counted, without a GPU.

    python tests/bench/fold_phases.py [--rows 64] [--steps 40] [--nodes 4 8 16] [--accept 0.7 0.9]

A verify in which a row folds takes twice as long of that row. Rows in the same phase of their windows would fold in the
same step, so steps would be uneven. How many tokens a step accepts is chance: each draft node is accepted with
probability `--accept` where the one before it was, on the longest path of a draft (N nodes as a chain, half of them
below the root as a comb of 16). The window's threshold is the default, a fold leaves the newest step's tokens.
"""

from __future__ import annotations

import argparse

import torch
from graph_timing import import_kernels

import_kernels()

from mamba_mtp_kernels.common.operands import Window  # noqa: E402

from sglang_mamba_mtp.state.window import threshold_for  # noqa: E402


def folds_by_step(
    nodes: int, accept: float, *, rows: int, steps: int, path: int | None = None, runs: int = 100
) -> torch.Tensor:
    """[steps, runs]: rows that fold. `path`: nodes of the longest path; None: all, a chain."""
    generator = torch.Generator().manual_seed(0)
    threshold, slots = threshold_for(None, nodes), torch.arange(runs * rows)
    pending, newest = torch.zeros(2, runs * rows, dtype=torch.int32)
    order = torch.zeros(1, threshold + 2 * nodes, dtype=torch.int32)
    window = Window(pending, order, threshold, newest=newest, length=torch.zeros_like(pending))
    counted = []
    for _ in range(steps):
        folding = window.folding(slots)
        counted.append((folding > 0).view(runs, rows).sum(1))
        drawn = torch.rand(runs * rows, (path or nodes) - 1, generator=generator) < accept
        newest.copy_(1 + drawn.cumprod(1).sum(1))
        pending += newest - folding
    return torch.stack(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--accept", type=float, nargs="+", default=[0.7, 0.9])
    options = parser.parse_args()
    print(f"rows of {options.rows} that fold, mean of 100 runs: the last step's and its deviation, then step by step")
    for nodes in options.nodes:
        for accept in options.accept:
            path = None if nodes < 16 else nodes // 2 + 1
            counted = folds_by_step(nodes, accept, rows=options.rows, steps=options.steps, path=path)
            by_step = " ".join(f"{mean:.0f}" for mean in counted.double().mean(1).tolist())
            last = counted[-1].double()
            print(f"N={nodes} {accept}: {last.mean():.1f} +- {last.std():.1f} | {by_step}")


if __name__ == "__main__":
    main()
