"""Convolution of a target verify on a GPU: conv1d_verify + commit_conv against SGLang's conv verify + conv scatter.

    python tests/bench/bench_conv1d.py [--batches 1 8 64] [--nodes 4 8] [--window 16] [--dim 8192] [--json FILE]

Times are per layer; the commit handles all layers in one launch, as stock's scatter does, and is divided by them. Rows
have tokens pending, half a window of them; "fold" is the commit of a step in which all rows fold, all but their newest
tokens, "commit" of one in which none does.
Pools are larger than the L2 cache and rotated. Errors are checked first; nothing is printed on red. The baseline
needs `sglang` (0.5.17) on PYTHONPATH and is left out, with a note, where it cannot be imported.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from cases import planned, tree_links, tree_parents
from graph_timing import environment, import_kernels, time_launches, write_record
from stock import StockConv

import_kernels()

from mamba_mtp_kernels.common.chain import chain_tree  # noqa: E402
from mamba_mtp_kernels.common.operands import Folds, Rows  # noqa: E402
from mamba_mtp_kernels.common.tree import build_tree  # noqa: E402
from mamba_mtp_kernels.conv1d.fold import commit_conv, fold_conv  # noqa: E402
from mamba_mtp_kernels.conv1d.reference import commit_conv_reference, conv1d_verify_reference  # noqa: E402
from mamba_mtp_kernels.conv1d.verify_replay import conv1d_verify  # noqa: E402
from mamba_mtp_kernels.conv1d.window import ConvWindow  # noqa: E402

LAYERS = 8
ROTATED_BYTES = 120e6


class Problem:
    """`sets` independent batches of bf16 inputs over one pool of LAYERS layers."""

    def __init__(
        self, dim: int, width: int, batch: int, nodes: int, kind: str, sets: int, threshold: int, seed: int = 0
    ):
        self.dim, self.width, self.batch, self.nodes, self.kind, self.sets = dim, width, batch, nodes, kind, sets
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda").bfloat16()

        rows = sets * batch
        self.x = randn(sets, batch * nodes, dim + 64)[:, :, :dim]
        self.weight, self.bias = randn(dim, width), randn(dim)
        self.conv_states = randn(LAYERS, rows + 1, dim, width - 1)
        capacity = threshold + 2 * nodes
        order = torch.arange(capacity, dtype=torch.int32, device="cuda").repeat(rows, 1)
        inputs = randn(LAYERS, rows, capacity, dim)

        def books(count: int) -> torch.Tensor:
            return torch.full((rows + 1,), count, dtype=torch.int32, device="cuda")

        newest = {"newest": books(min(nodes // 2 + 1, threshold)), "length": books(0)}
        self.idle = ConvWindow(books(threshold // 2), order, threshold, inputs, **newest)
        self.folding = ConvWindow(books(threshold + nodes), order, threshold, inputs, **newest)
        self.slots = 1 + torch.randperm(rows, generator=generator, device="cuda").int().view(sets, batch)
        self.rows = torch.randperm(rows, generator=generator, device="cuda").int().view(sets, batch)
        self.last = torch.full((batch,), nodes // 2, dtype=torch.int32, device="cuda")
        self.links = self.make_links()
        self.indices = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.stock_parents = None if self.links[0] is None else torch.empty_like(self.links[0])
        parents, ancestors = (table.repeat(batch, 1) for table in chain_tree(nodes, "cuda"))
        self.parents, self.ancestors = parents, ancestors
        self.build_tree()
        given = [Rows(*where, parents=self.parents) for where in zip(self.slots, self.rows, strict=True)]
        self.batch_rows = [[planned(rows, window, nodes) for rows in given] for window in (self.idle, self.folding)]

    def make_links(self) -> list[torch.Tensor | None]:
        """None for a chain; else a comb: every other node has a sibling leaf."""
        if self.kind == "chain":
            return [None, None]
        links = torch.tensor(tree_links(tree_parents("comb", self.nodes)), dtype=torch.int64)
        return list(links[:, None].expand(2, self.batch, self.nodes).contiguous().cuda())

    def build_tree(self) -> None:
        if self.kind == "tree":
            next_token, next_sibling = self.links
            build_tree(
                self.parents,
                self.ancestors,
                retrieve_next_token=next_token,
                retrieve_next_sibling=next_sibling,
                batch=self.batch,
            )

    def verify(self, which: int, op=conv1d_verify, **extra: Any) -> torch.Tensor:
        arguments = {
            "conv_states": self.conv_states[0],
            "weight": self.weight,
            "bias": self.bias,
            "activation": "silu",
            "rows": self.batch_rows[0][which],
            "window": self.idle.layer(0),
        }
        return op(self.x[which], **{**arguments, **extra})

    def commit(self, which: int, window: ConvWindow, conv_states: torch.Tensor, op=commit_conv) -> None:
        op(conv_states, window, self.batch_rows[window is self.folding][which])

    def settled(self, which: int) -> torch.Tensor:
        """The convolution's states of layer 0 with all pending tokens of a batch in them."""
        states, slots = self.conv_states[:1].clone(), self.slots[which]
        every = Folds(slots, slots, self.rows[which], self.idle.pending[slots.long()])
        fold_conv(states, self.idle.layer(0).of_all_layers(), every)
        return states[0]


class Stock(StockConv):
    """SGLang's kernels on a problem's tensors."""

    def dense_windows(self, problem: Problem) -> torch.Tensor:
        """One dense window per node: [LAYERS, batch, N, dim, K-1]."""
        return self.windows(LAYERS, problem.batch, problem.nodes, problem.conv_states, chain=False)

    def verify_problem(
        self, problem: Problem, which: int, conv_states: torch.Tensor, windows: torch.Tensor
    ) -> torch.Tensor:
        return self.verify(
            problem.x[which],
            conv_states=conv_states,
            weight=problem.weight,
            bias=problem.bias,
            slots=problem.slots[which],
            windows=windows,
            indices=problem.indices,
            links=(problem.links[0], problem.links[1]),
            parents=problem.stock_parents,
        )


def check(problem: Problem, stock: Stock | None) -> dict[str, float]:
    """Error against float64, and copies compared exactly; exits on red."""
    # the oracle first: its verify writes the same inputs
    expected = problem.verify(0, conv1d_verify_reference, compute_dtype=torch.float64)
    y = problem.verify(0)
    result = {"ours": float((y.double() - expected).norm() / expected.norm())}
    if stock is not None:
        theirs = stock.verify_problem(problem, 0, problem.settled(0), stock.dense_windows(problem)[0])
        result["stock"] = float((theirs.double() - expected).norm() / expected.norm())
        result["differing outputs"] = int((theirs != y).sum())
    ours, reference = problem.conv_states.clone(), problem.conv_states.clone()
    problem.commit(0, problem.folding, ours)
    problem.commit(0, problem.folding, reference, commit_conv_reference)
    same, folded = torch.equal(ours, reference), not torch.equal(ours, problem.conv_states)
    problem.commit(0, problem.idle, ours)
    same &= torch.equal(ours, reference)
    limit = 2 * result.get("stock", 2e-3)
    if not (result["ours"] <= limit and same and folded):
        sys.exit(f"RED {problem.dim} N={problem.nodes} {problem.kind}: {result}, commit {same}, folded {folded}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--json")
    options = parser.parse_args()
    try:
        stock: Stock | None = Stock()
        note = "stock: sglang's kernels from PYTHONPATH"
    except ImportError as error:
        stock, note = None, f"stock baseline left out: {error}"
    record: dict[str, Any] = {"environment": environment(), "options": vars(options), "note": note, "results": []}
    for nodes in options.nodes:
        for kind in ("chain", "tree"):
            for batch in options.batches:
                row_bytes = options.dim * 2 * (3 * nodes + options.width)
                sets = max(2, min(64, int(ROTATED_BYTES) // (batch * row_bytes)))
                problem = Problem(options.dim, options.width, batch, nodes, kind, sets, options.window)
                entry: dict[str, Any] = {"batch": batch, "nodes": nodes, "kind": kind, "errors": check(problem, stock)}
                which = range(sets)
                entry["verify"] = time_launches([lambda s=s, p=problem: p.verify(s) for s in which])
                for name, window in (("commit", problem.idle), ("fold", problem.folding)):
                    entry[name] = time_launches(
                        [lambda s=s, p=problem, w=window: p.commit(s, w, p.conv_states) for s in which]
                    )
                if kind == "tree":
                    entry["build_tree"] = time_launches([problem.build_tree] * 8)
                if stock is not None:
                    windows = stock.dense_windows(problem)
                    entry["stock verify"] = time_launches(
                        [
                            lambda s=s, p=problem, w=windows: stock.verify_problem(p, s, p.conv_states[0], w[0])
                            for s in which
                        ]
                    )
                    entry["stock scatter"] = time_launches(
                        [
                            lambda s=s, p=problem, w=windows: stock.scatter(p.conv_states, w, p.slots[s], p.last)
                            for s in which
                        ]
                    )
                record["results"].append(entry)
                del problem
    write_record(options.json, record)

    print(note)
    print(f"dim {options.dim}, K {options.width}, bf16, us per layer ({LAYERS} layers a commit); build_tree: us a step")
    print("N kind batch | verify + commit (fold) | stock verify + scatter | stock/ours | build_tree | errors")
    for entry in record["results"]:
        verify, commit, fold = entry["verify"]["us"], entry["commit"]["us"] / LAYERS, entry["fold"]["us"] / LAYERS
        line = f"{entry['nodes']} {entry['kind']} {entry['batch']:4d} | {verify:6.2f} + {commit:5.2f} ({fold:5.2f}) | "
        if "stock verify" in entry:
            theirs, scatter = entry["stock verify"]["us"], entry["stock scatter"]["us"] / LAYERS
            line += f"{theirs:6.2f} + {scatter:5.2f} | {(theirs + scatter) / (verify + commit):.2f} | "
        line += f"{entry['build_tree']['us']:.2f} | " if "build_tree" in entry else "- | "
        print(line + " ".join(f"{name} {error:.2g}" for name, error in entry["errors"].items()))


if __name__ == "__main__":
    main()
