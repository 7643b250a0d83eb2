"""Mamba2 target verify on a GPU: replay against SGLang's decode, and its verify + scatter, in one run.

    python tests/bench/bench_mamba2.py [--batches 1 8 64] [--nodes 4 8] [--window 16] [--json FILE]
    python tests/bench/bench_mamba2.py --sweep          # launch shapes at the largest batch

Times are per layer, amortised over the window cycle at accept length N/2+1, rows at staggered phases of the cycle.
Pools are larger than the L2 cache and rotated. Errors against float64 are checked first; nothing is printed on red.
The baseline needs `sglang` (0.5.17) on PYTHONPATH and is left out, with a note, where it cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
from functools import partial
from typing import Any

import torch
from cases import DTYPES, Mamba2Shape, ancestor_masks, planned, rms_ratio, sets_for, tree_parents, window_cycle
from graph_timing import environment, import_kernels, time_launches, write_record
from stock import StockMamba2

import_kernels()

from mamba_mtp_kernels.common.operands import Folds, Rows, States  # noqa: E402
from mamba_mtp_kernels.mamba2.fold import mamba2_fold  # noqa: E402
from mamba_mtp_kernels.mamba2.reference import mamba2_verify_reference  # noqa: E402
from mamba_mtp_kernels.mamba2.verify_replay import Tiling, mamba2_verify  # noqa: E402
from mamba_mtp_kernels.mamba2.window import Mamba2Window  # noqa: E402

ERROR_FACTOR, ERROR_CAP = 2.0, 1e-6


class Problem:
    """`sets` independent batches over one pool, with the bookkeeping of every phase of the window cycle."""

    def __init__(self, shape: Mamba2Shape, batch: int, nodes: int, kind: str, window: int, sets: int, seed: int = 0):
        self.shape, self.batch, self.nodes, self.window, self.sets = shape, batch, nodes, window, sets
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        tokens, heads, capacity = batch * nodes, shape.nheads, window + 2 * nodes
        groups_width = shape.ngroups * shape.dstate
        inner = heads * shape.headdim
        rows = sets * batch
        # x | B | C side by side, as the conv leaves them
        self.packed = randn(sets, tokens, inner + 2 * groups_width).bfloat16()
        self.dt = (randn(sets, tokens, heads) - 1).bfloat16()
        self.A = -torch.rand(heads, generator=generator, device="cuda") * 4 - 0.5
        self.D, self.dt_bias = randn(heads), randn(heads) - 1
        self.checkpoint = torch.empty(
            rows + 1, heads, shape.headdim, shape.dstate, dtype=DTYPES[shape.state], device="cuda"
        ).normal_(generator=generator)
        self.slots = 1 + torch.randperm(rows, generator=generator, device="cuda").int().view(sets, batch)
        self.rows = torch.randperm(rows, generator=generator, device="cuda").int().view(sets, batch)
        self.order = torch.stack(
            [torch.randperm(capacity, generator=generator, device="cuda").int() for _ in range(rows)]
        )
        self.inputs_of_window = {
            "x": randn(rows, capacity, heads, shape.headdim).bfloat16(),
            "B": randn(rows, capacity, shape.ngroups, shape.dstate).bfloat16(),
            "dt": torch.rand(rows, capacity, heads, generator=generator, device="cuda") * 0.5,
        }
        parents = tree_parents(kind, nodes)
        self.parents = torch.tensor(parents, dtype=torch.int32, device="cuda").expand(batch, nodes).contiguous()
        self.ancestors = torch.tensor(ancestor_masks(parents), device="cuda").expand(batch, nodes).contiguous()

    def inputs(self, which: int) -> tuple[torch.Tensor, ...]:
        shape = self.shape
        inner, width = shape.nheads * shape.headdim, shape.ngroups * shape.dstate
        x, B, C = self.packed[which].split([inner, width, width], dim=1)
        return (
            x.unflatten(1, (shape.nheads, shape.headdim)),
            self.dt[which],
            B.unflatten(1, (shape.ngroups, shape.dstate)),
            C.unflatten(1, (shape.ngroups, shape.dstate)),
        )

    def pending(self, counts: list[int]) -> torch.Tensor:
        """[S] pending counts: row b of every set has counts[b % len]."""
        pending = torch.zeros(self.checkpoint.shape[0], dtype=torch.int32, device="cuda")
        per_row = torch.tensor([counts[b % len(counts)] for b in range(self.batch)], dtype=torch.int32, device="cuda")
        pending[self.slots.long()] = per_row.expand(self.sets, self.batch)
        return pending

    def verify(
        self,
        which: int,
        pending: torch.Tensor,
        op=mamba2_verify,
        *,
        checkpoint: torch.Tensor | None = None,
        rows: Rows | None = None,
        exact: bool = False,
        **extra: Any,
    ) -> torch.Tensor:
        """One verify of a set, on the nodes that lie in the window. `checkpoint`: states in place of the pool's. rows:
        of `planned_rows`, where that is not to be timed. exact: on float64 copies of the window."""
        _, dt, _, C = self.inputs(which)
        return op(
            dt,
            C,
            A=self.A,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            states=States(self.checkpoint if checkpoint is None else checkpoint),
            rows=rows or self.planned_rows(which, pending),
            window=self.window_of(pending, exact),
            **extra,
        )

    def planned_rows(self, which: int, pending: torch.Tensor, ordered: bool = False) -> Rows:
        rows = Rows(self.slots[which], self.rows[which], ancestors=self.ancestors)
        return planned(rows, self.window_of(pending), self.nodes, ordered)

    def window_of(self, pending: torch.Tensor, exact: bool = False) -> Mamba2Window:
        inputs = {name: x.double() if exact else x for name, x in self.inputs_of_window.items()}
        return Mamba2Window(pending, self.order, self.window, **inputs)

    def settle(self, which: int, counts: torch.Tensor) -> None:
        """mamba2_fold of the first counts[b] tokens of every row of a set, in place."""
        window = {name: x[None] for name, x in self.inputs_of_window.items()}
        none = torch.zeros(self.checkpoint.shape[0], dtype=torch.int32, device="cuda")
        mamba2_fold(
            States(self.checkpoint[None]),
            Mamba2Window(none, self.order, self.window, **window),
            Folds(self.slots[which], self.slots[which], self.rows[which], counts),
            A=self.A[None],
        )


class Stock(StockMamba2):
    """SGLang's kernels on a problem's tensors."""

    def arguments(self, problem: Problem, which: int, nodes: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
        batch = problem.batch
        inputs = [t[: batch * nodes].unflatten(0, (batch, nodes)) for t in problem.inputs(which)]
        shared = {"A": problem.A, "D": problem.D, "dt_bias": problem.dt_bias}
        return inputs, {**shared, "states": problem.checkpoint, "slots": problem.slots[which]}

    def decode_problem(self, problem: Problem, which: int, out: torch.Tensor) -> None:
        inputs, arguments = self.arguments(problem, which, 1)
        self.decode(*inputs, **arguments, out=out)

    def verify_problem(self, problem: Problem, which: int, out: torch.Tensor, buffer: torch.Tensor, tree: bool) -> None:
        inputs, arguments = self.arguments(problem, which, problem.nodes)
        self.verify(
            *inputs,
            **arguments,
            out=out,
            buffer=buffer,
            indices=torch.arange(problem.batch, dtype=torch.int32, device="cuda"),  # in every layer, as SGLang's mixer
            parents=problem.parents if tree else None,
        )


def check_errors(
    shape: Mamba2Shape, nodes: int, kind: str, window: int, stock: Stock | None, tiling: Tiling | None
) -> dict:
    """Errors against float64 on a batch with empty, partly filled and folding windows."""
    problem = Problem(shape, 4, nodes, kind, window, sets=1, seed=7)
    size = (problem.batch * nodes, shape.nheads, shape.headdim)
    result = {}
    for label, counts in (("empty", [0]), ("ragged", [0, window, max(window - 3, 0), window + nodes])):
        problem.checkpoint.normal_()
        pending = problem.pending(counts)
        exact = problem.checkpoint.double()
        expected = problem.verify(
            0, pending, mamba2_verify_reference, checkpoint=exact, exact=True, compute_dtype=torch.float64
        )
        if stock is not None and label == "empty":
            out = torch.full(size, float("nan"), device="cuda")
            buffer = torch.zeros(problem.batch, nodes, *problem.checkpoint.shape[1:], device="cuda").to(
                problem.checkpoint.dtype
            )
            stock.verify_problem(problem, 0, out.view(problem.batch, nodes, *size[1:]), buffer, kind != "chain")
            result["stock"] = rms_ratio(out, expected)
        out = torch.full(size, float("nan"), device="cuda")
        problem.verify(0, pending, out=out, tiling=tiling)
        result[label] = rms_ratio(out, expected)
        result[f"{label} state"] = rms_ratio(problem.checkpoint, exact)
    if shape.state == "fp32":
        limit = max(ERROR_FACTOR * result.get("stock", 0.0), ERROR_CAP)
        bad = {name: error for name, error in result.items() if name != "stock" and error > limit}
        if bad:
            sys.exit(f"RED {shape} N={nodes} {kind} {tiling}: errors {result}, limit {limit:.1e}")
    return result


def time_ours(problem: Problem, tiling: Tiling | None, budget_ms: float = 250.0) -> dict[str, dict[str, float]]:
    cycle = window_cycle(problem.nodes // 2 + 1, problem.window)
    which = range(problem.sets)

    def launches(counts_per_step: list[list[int]], ordered: bool = True) -> list:
        calls = []
        for counts in counts_per_step:
            pending = problem.pending(counts)
            for s in which:
                rows = problem.planned_rows(s, pending, ordered)
                calls.append(partial(problem.verify, s, pending, tiling=tiling, rows=rows))
        return calls

    shifted = [cycle[k:] + cycle[:k] for k in range(len(cycle))]
    return {
        "amortised": time_launches(launches(shifted), budget_ms=budget_ms),
        "unordered": time_launches(launches(shifted, ordered=False), budget_ms=budget_ms),
        "no fold": time_launches(launches([[count] for count in cycle[:-1]] or [[0]]), budget_ms=budget_ms),
        "all fold": time_launches(launches([[cycle[-1]]]), budget_ms=budget_ms),
    }


def time_stock(stock: Stock, problem: Problem, tree: bool) -> dict[str, dict[str, float]]:
    batch, nodes = problem.batch, problem.nodes
    shape = problem.shape
    out = torch.empty(batch, nodes, shape.nheads, shape.headdim, dtype=torch.bfloat16, device="cuda")
    copies = 1 if batch >= 8 else 4
    buffers = torch.zeros(
        copies, 1, batch, nodes, *problem.checkpoint.shape[1:], dtype=problem.checkpoint.dtype, device="cuda"
    )
    accepted = torch.full((batch,), nodes // 2, dtype=torch.int32, device="cuda")
    which = range(problem.sets)
    pool = problem.checkpoint[None]
    return {
        "decode": time_launches([lambda s=s: stock.decode_problem(problem, s, out[:, :1]) for s in which]),
        "verify": time_launches(
            [lambda s=s: stock.verify_problem(problem, s, out, buffers[s % copies, 0], tree) for s in which]
        ),
        "scatter": time_launches(
            [lambda s=s: stock.scatter(pool, buffers[s % copies], problem.slots[s], accepted) for s in which]
        ),
    }


def time_settle(problem: Problem) -> dict[str, float]:
    """mamba2_fold of a full window, every row."""
    counts = torch.full((problem.batch,), problem.window, dtype=torch.int32, device="cuda")
    return time_launches([lambda s=s: problem.settle(s, counts) for s in range(problem.sets)])


def candidates(shape: Mamba2Shape) -> list[Tiling]:
    """Launch shapes near the best of a wider sweep (blocks of 64 rows and more warps were 1.3 to 4 times slower)."""
    found = []
    for block_p, registers in ((16, (0, 168, 144, 128)), (32, (0, 168))):
        blocks = -(-shape.headdim // block_p)
        found += [Tiling(block_p, blocks, 1, stages, count) for stages in (2, 3) for count in registers]
    return found


def compile_slice(arguments: tuple) -> None:
    """Worker: fill Triton's disk cache for some launch shapes."""
    shape, batch, nodes, window, tilings = arguments
    problem = Problem(shape, batch, nodes, "chain", window, 2)
    for tiling in tilings:
        with contextlib.suppress(Exception):  # out of shared memory: shows again in the sweep
            pending = problem.pending([0])
            for ordered in (False, True):
                problem.verify(0, pending, tiling=tiling, rows=problem.planned_rows(0, pending, ordered))


def sweep(shape: Mamba2Shape, batch: int, nodes: int, window: int, workers: int = 12) -> list[dict[str, Any]]:
    tilings = candidates(shape)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_slice, [(shape, batch, nodes, window, tilings[k::workers]) for k in range(workers)])
    problem = Problem(shape, batch, nodes, "chain", window, sets_for(batch * shape.state_bytes))
    found = []
    for tiling in tilings:
        try:
            times = time_ours(problem, tiling, budget_ms=60)
        except Exception as error:  # out of shared memory: not a candidate
            print(tuple(tiling), type(error).__name__, flush=True)
            continue
        found.append({"tiling": list(tiling), **times})
        print(tuple(tiling), " ".join(f"{k} {v['us']:.1f}" for k, v in times.items()), flush=True)
    return sorted(found, key=lambda entry: entry["amortised"]["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", default=["chain", "tree"], choices=["chain", "tree"])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--heads", type=int, nargs=4, default=[128, 80, 128, 8], metavar=("H", "P", "S", "G"))
    parser.add_argument("--state", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--tiling", type=int, nargs=5, metavar=("BLOCK_P", "BLOCKS", "WARPS", "STAGES", "REGISTERS"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    shape = Mamba2Shape(*options.heads, state=options.state)
    tiling = Tiling(*options.tiling) if options.tiling else None
    try:
        stock: Stock | None = Stock()
        note = "stock: sglang's kernels from PYTHONPATH"
    except ImportError as error:
        stock, note = None, f"stock baseline left out: {error}"

    record: dict[str, Any] = {"environment": environment(), "options": vars(options), "note": note, "results": []}
    if options.sweep:
        record["results"] = sweep(shape, max(options.batches), max(options.nodes), options.window)
        write_record(options.json, record)
        for entry in record["results"][:8]:
            print(entry["tiling"], f"{entry['amortised']['us']:.1f} us")
        return

    for nodes in options.nodes:
        for kind in options.kinds:
            errors = check_errors(shape, nodes, kind, options.window, stock, tiling)
            for batch in options.batches:
                problem = Problem(shape, batch, nodes, kind, options.window, sets_for(batch * shape.state_bytes))
                entry = {"batch": batch, "nodes": nodes, "kind": kind, "errors": errors}
                entry["ours"] = time_ours(problem, tiling)
                if kind == "chain" and nodes == options.nodes[0]:
                    entry["settle"] = time_settle(problem)
                if stock is not None:
                    entry["stock"] = time_stock(stock, problem, kind != "chain")
                record["results"].append(entry)
                del problem
                torch.cuda.empty_cache()
    write_record(options.json, record)

    print(note)
    print(f"{shape}, window {options.window}, us per layer")
    print(
        "N kind  batch |  ours  (no fold, all fold) | read GB/s | decode  verify+scatter | /decode  stock/ours | errors"
    )
    for entry in record["results"]:
        ours = {name: value["us"] for name, value in entry["ours"].items()}
        bandwidth = entry["batch"] * shape.state_bytes / ours["no fold"] / 1e3
        line = f"{entry['nodes']} {entry['kind']} {entry['batch']:4d} | {ours['amortised']:7.1f} "
        line += f"({ours['no fold']:7.1f}, {ours['all fold']:7.1f}) | {bandwidth:6.0f} | "
        if "stock" in entry:
            base = {name: value["us"] for name, value in entry["stock"].items()}
            both = base["verify"] + base["scatter"]
            line += f"{base['decode']:7.1f} {base['verify']:7.1f}+{base['scatter']:.1f} | "
            line += f"{ours['amortised'] / base['decode']:.2f} {both / ours['amortised']:.2f} | "
        line += " ".join(f"{name} {error:.1e}" for name, error in entry["errors"].items())
        if "settle" in entry:
            line += f" | settle {entry['settle']['us']:.1f}"
        print(line)


if __name__ == "__main__":
    main()
