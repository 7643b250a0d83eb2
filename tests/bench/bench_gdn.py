"""GDN target verify on a GPU: replay against SGLang's decode, and its verify + scatter, in one run.

    python tests/bench/bench_gdn.py [--batches 1 8 32 64] [--cases 4:chain 8:chain 8:tree 16:tree] [--json FILE]
    python tests/bench/bench_gdn.py --windows 0 8 16 32 --batches 64 --cases 8:chain     # choose the window
    python tests/bench/bench_gdn.py --sweep [--cases 8:chain] [--batches 64 8]           # launch shapes

Times are per layer, amortised over the window cycle at accept length N/2+1, rows at staggered phases of the cycle. Both
sides pay for the states that the radix cache tracks, at their share (cases.boundaries): SGLang with a second scatter in
every step, replay with a fold. Folds leave the newest step pending. Whole steps, convolution and all, are
bench_modes.py's.
Pools are larger than the L2 cache and rotated. Errors against float64 are checked first; nothing is printed on red.
The baseline needs `sglang` (0.5.17) on PYTHONPATH and is left out, with a note, where it cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from cases import (
    DTYPES,
    GdnShape,
    ancestor_masks,
    apart,
    boundaries,
    planned,
    rms_ratio,
    sets_for,
    tree_parents,
    window_cycle,
)
from graph_timing import environment, import_kernels, time_launches, time_mixture, write_record
from stock import StockGdn

import_kernels()

from mamba_mtp_kernels.common.operands import Folds, Rows, States  # noqa: E402
from mamba_mtp_kernels.gdn.fold import gdn_fold  # noqa: E402
from mamba_mtp_kernels.gdn.reference import gdn_verify_reference, token_factors  # noqa: E402
from mamba_mtp_kernels.gdn.verify_replay import VerifyConfig, default_config, gdn_verify  # noqa: E402
from mamba_mtp_kernels.gdn.window import GdnWindow  # noqa: E402


class Problem:
    """`sets` independent batches over one pool, random inputs, windows full of plausible tokens."""

    def __init__(
        self, shape: GdnShape, batch: int, nodes: int, kind: str, window: int, sets: int, seed: int = 0
    ) -> None:
        self.accept = nodes // 2 + 1
        self.shape, self.batch, self.nodes, self.window, self.sets = shape, batch, nodes, window, sets
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        tokens, rows, capacity = batch * nodes, sets * batch, window + 2 * nodes
        # q | k | v side by side, as the conv leaves them
        self.packed = randn(sets, tokens, 2 * shape.H * shape.K + shape.HV * shape.V).bfloat16()
        self.gates = randn(sets, tokens, 2 * shape.HV).bfloat16()
        self.A_log, self.dt_bias = randn(shape.HV) * 0.5, randn(shape.HV) * 0.5
        self.scale = shape.K**-0.5
        self.states = torch.empty(
            rows + 1, shape.HV, shape.V, shape.K, dtype=DTYPES[shape.state], device="cuda"
        ).normal_(generator=generator)
        self.window_inputs = {
            "k": randn(rows, capacity, shape.H, shape.K).bfloat16(),
            "v": randn(rows, capacity, shape.HV, shape.V).bfloat16(),
            "g": -torch.rand(rows, capacity, shape.HV, generator=generator, device="cuda"),
            "beta": torch.rand(rows, capacity, shape.HV, generator=generator, device="cuda"),
        }
        held = self.window_inputs
        held["factors"] = token_factors(held["k"].float(), held["g"], held["beta"])
        self.slots = 1 + torch.randperm(rows, generator=generator, device="cuda").int().view(sets, batch)
        self.rows = torch.randperm(rows, generator=generator, device="cuda").int().view(sets, batch)
        self.order = torch.rand(rows, capacity, generator=generator, device="cuda").argsort(1).int()
        parents = tree_parents(kind, nodes)
        masks = ancestor_masks(parents)
        self.indices = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.parents = torch.tensor(parents, dtype=torch.int64, device="cuda").expand(batch, nodes).contiguous()
        self.ancestors = torch.tensor(masks, dtype=torch.int64, device="cuda").expand(batch, nodes).contiguous()

    def inputs(self, which: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, a, b of one set."""
        shape = self.shape
        q, k, v = self.packed[which].split([shape.H * shape.K, shape.H * shape.K, shape.HV * shape.V], dim=1)
        a, b = self.gates[which].split(shape.HV, dim=1)
        return (
            q.unflatten(1, (shape.H, shape.K)),
            k.unflatten(1, (shape.H, shape.K)),
            v.unflatten(1, (shape.HV, shape.V)),
            a,
            b,
        )

    def pending(self, counts: list[int]) -> torch.Tensor:
        """[S] pending counts: row b of every set has counts[b % len]."""
        pending = torch.zeros(self.states.shape[0], dtype=torch.int32, device="cuda")
        per_row = torch.tensor([counts[b % len(counts)] for b in range(self.batch)], dtype=torch.int32, device="cuda")
        pending[self.slots.long()] = per_row.expand(self.sets, self.batch)
        return pending

    def window_with(self, pending: torch.Tensor) -> GdnWindow:
        newest = pending.clamp(max=self.accept)
        return GdnWindow(
            pending, self.order, self.window, **self.window_inputs, newest=newest, length=torch.zeros_like(newest)
        )

    def double(self) -> Problem:
        """A copy whose states (float32 ones) and window inputs are float64."""
        other = copy.copy(self)
        other.states = self.states.double() if self.states.dtype == torch.float32 else self.states.clone()
        other.window_inputs = {name: tensor.double() for name, tensor in self.window_inputs.items()}
        return other

    def verify(
        self,
        which: int,
        pending: torch.Tensor,
        op: Callable[..., torch.Tensor] = gdn_verify,
        schedule: torch.Tensor | None = None,
        **extra: Any,
    ) -> torch.Tensor:
        """Run op on the nodes that lie in the window; with compute_dtype among `extra`, on inputs of that dtype."""
        q, _, _, a, b = (x.to(extra.get("compute_dtype", x.dtype)) for x in self.inputs(which))
        return op(
            q,
            a,
            b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            scale=self.scale,
            states=States(self.states),
            rows=Rows(self.slots[which], self.rows[which], ancestors=self.ancestors, schedule=schedule),
            window=self.window_with(pending),
            **extra,
        )


class Stock(StockGdn):
    """SGLang's kernels on a problem's tensors."""

    def decode_problem(self, problem: Problem, which: int, out: torch.Tensor) -> None:
        """One token a row; out [B, 1, HV, V]."""
        *_, a, b = problem.inputs(which)
        batch = problem.batch
        self.decode(
            problem.packed[which, :batch],
            a[:batch],
            b[:batch],
            A_log=problem.A_log,
            dt_bias=problem.dt_bias,
            scale=problem.scale,
            states=problem.states,
            slots=problem.slots[which],
            out=out,
        )

    def verify_problem(
        self, problem: Problem, which: int, buffer: torch.Tensor, starts: torch.Tensor, tree: bool
    ) -> torch.Tensor:
        """buffer [B, N, HV, V, K]; starts [B + 1] first token of each row. Returns [B*N, HV, V]."""
        q, k, v, a, b = problem.inputs(which)
        return self.verify(
            q[None],
            k[None],
            v[None],
            a,
            b,
            A_log=problem.A_log,
            dt_bias=problem.dt_bias,
            states=problem.states,
            slots=problem.slots[which],
            buffer=buffer,
            starts=starts,
            indices=problem.indices,
            parents=problem.parents if tree else None,
        )


def starts_of(problem: Problem) -> torch.Tensor:
    return torch.arange(0, problem.batch * problem.nodes + 1, problem.nodes, dtype=torch.int32, device="cuda")


def check_errors(
    shape: GdnShape, nodes: int, kind: str, window: int, stock: Stock | None, config: VerifyConfig | None
) -> dict[str, float]:
    """Errors against float64 on a batch with empty, partly filled and folding windows; exits on red.

    The limit is twice stock's own error, or where stock is missing twice what rounding the exact output to bf16 costs.
    """
    problem = Problem(shape, 4, nodes, kind, window, sets=1, seed=7)
    result: dict[str, float] = {}
    for label, counts in (("empty", [0]), ("ragged", [0, window, max(window - 3, 0), window + nodes])):
        pending = problem.pending(counts)
        exact = problem.double()
        expected = exact.verify(0, pending, gdn_verify_reference, compute_dtype=torch.float64)
        if label == "empty":
            result["rounding"] = rms_ratio(expected.bfloat16(), expected)
            if stock is not None:
                buffer = torch.zeros(problem.batch, nodes, *problem.states.shape[1:], device="cuda")
                out = stock.verify_problem(
                    problem, 0, buffer.to(DTYPES[shape.state]), starts_of(problem), kind != "chain"
                )
                result["stock"] = rms_ratio(out, expected)
        result[label] = rms_ratio(problem.verify(0, pending, config=config), expected)
        result[f"{label} state"] = rms_ratio(problem.states, exact.states.double())
    # a bf16 tree re-reads rounded states at stock: not a yardstick to be generous with
    limit = 2 * min(result["rounding"], result.get("stock", result["rounding"]))
    bad = {name: result[name] for name in ("empty", "ragged") if not result[name] <= limit}
    if shape.state == "fp32" and not result["ragged state"] <= 2e-6:
        bad["ragged state"] = result["ragged state"]
    if bad:
        sys.exit(f"RED {shape} N={nodes} {kind} W={window} {config}: {bad}, limit {limit:.1e}, all {result}")
    return result


def time_ours(problem: Problem, config: VerifyConfig | None, budget_ms: float) -> dict[str, dict[str, float]]:
    cycle = window_cycle(problem.accept, problem.window, problem.accept, problem.nodes)

    def timed(counts_per_step: list[list[int]], ordered: bool = True) -> dict[str, float]:
        launches = []
        for counts in counts_per_step:
            pending = problem.pending(counts)
            for s in range(problem.sets):
                rows = Rows(problem.slots[s], problem.rows[s])
                schedule = planned(rows, problem.window_with(pending), problem.nodes, ordered).schedule
                launches.append(partial(problem.verify, s, pending, config=config, schedule=schedule))
        return time_launches(launches, budget_ms=budget_ms)

    shifted = [cycle[k:] + cycle[:k] for k in range(len(cycle))]
    result = {"amortised": timed(shifted), "unordered": timed(shifted, ordered=False), "all fold": timed([[cycle[-1]]])}
    waiting = [[count] for count in cycle if count <= problem.window]
    result["no fold"] = timed(waiting) if waiting else result["all fold"]
    return result


def time_stock(stock: Stock, problem: Problem, tree: bool, budget_ms: float) -> dict[str, dict[str, float]]:
    shape, batch, nodes = problem.shape, problem.batch, problem.nodes
    pool = problem.states
    out = torch.empty(batch, 1, shape.HV, shape.V, dtype=torch.bfloat16, device="cuda")
    copies = 1 if batch >= 32 else 4
    buffers = torch.zeros(copies, 1, batch, nodes, *pool.shape[1:], dtype=pool.dtype, device="cuda")
    accepted = torch.full((batch,), nodes // 2, dtype=torch.int32, device="cuda")
    fewer, share = boundaries(batch, nodes // 2 + 1)

    def scatters(tracked: int) -> list[Callable[[], None]]:
        """Of the accepted states to the slots, and of the tracked ones: to the slots of another set, say."""
        track = torch.full_like(accepted, -1)
        track[apart(batch, tracked)] = nodes // 4

        def scatter(s: int) -> None:
            stock.scatter(pool[None], buffers[s % copies], problem.slots[s], accepted)
            stock.scatter(pool[None], buffers[s % copies], problem.slots[s - 1], track)

        return [partial(scatter, s) for s in which]

    starts = starts_of(problem)
    which = range(problem.sets)
    launches = {
        "decode": [lambda s=s: stock.decode_problem(problem, s, out) for s in which],
        "verify": [lambda s=s: stock.verify_problem(problem, s, buffers[s % copies, 0], starts, tree) for s in which],
    }
    result = {name: time_launches(calls, budget_ms=budget_ms) for name, calls in launches.items()}
    return result | {"scatter": time_mixture(scatters, fewer, share, budget_ms=budget_ms)}


def time_folds(problem: Problem, budget_ms: float) -> dict[str, dict[str, float]]:
    """gdn_fold outside a verify: "settle" of a full window in every row, and "track" of half a window in the rows that
    pass a track boundary, to slots of another set."""
    states = States(problem.states[None])
    window = problem.window_with(problem.pending([problem.window]))
    window = replace(window, **{name: tensor[None] for name, tensor in problem.window_inputs.items()})
    full = torch.full((problem.batch,), problem.window, dtype=torch.int32, device="cuda")

    def launches(dst: torch.Tensor, counts: torch.Tensor) -> list[Callable[[], None]]:
        folds = [Folds(*where, counts) for where in zip(problem.slots, dst, problem.rows, strict=True)]
        return [partial(gdn_fold, states, window, fold) for fold in folds]

    def tracked(rows: int) -> list[Callable[[], None]]:
        chosen = torch.zeros_like(full)
        chosen[apart(problem.batch, rows)] = 1
        return launches(problem.slots.roll(1, 0) * chosen, full // 2 * chosen)

    fewer, share = boundaries(problem.batch, problem.nodes // 2 + 1)
    return {
        "settle": time_launches(launches(problem.slots, full), budget_ms=budget_ms),
        "track": time_mixture(tracked, fewer, share, budget_ms=budget_ms),
    }


def default_for(nodes: int, window: int) -> VerifyConfig:
    """A large batch's."""
    return default_config(nodes=nodes, values=128, exact=False, fold_threshold=window, overlap=True)


def candidates() -> list[dict[str, Any]]:
    """Changes from the default of a large batch that are worth a timing: none, each that might pay, some combined."""
    return [
        {},
        {"overlap": False},
        {"num_stages": 1},
        {"num_stages": 3},
        {"num_stages": 4},
        {"fold_stages": 1},
        {"fold_stages": 3},
        {"num_stages": 3, "fold_stages": 1},
        {"block_v": 16, "blocks": 8, "num_warps": 1},
        {"block_v": 16, "blocks": 8, "num_warps": 1, "num_stages": 3},
        {"block_v": 16, "blocks": 8, "num_warps": 1, "fold_stages": 1},
        {"block_v": 16, "blocks": 8, "num_warps": 1, "fold_stages": 1, "registers": 168},
        {"block_v": 16, "blocks": 8, "num_warps": 2},
        {"block_v": 16, "blocks": 4, "num_warps": 1},
        {"block_v": 16, "blocks": 1, "num_warps": 1, "num_stages": 1, "fold_stages": 1},
        {"block_v": 16, "blocks": 1, "num_warps": 2, "num_stages": 1, "fold_stages": 1},
        {"block_v": 32, "blocks": 4, "num_warps": 2},
        {"block_v": 32, "blocks": 2, "num_warps": 2},
        {"block_v": 32, "blocks": 1, "num_warps": 2, "num_stages": 1, "fold_stages": 1},
        {"block_v": 32, "blocks": 4, "num_warps": 2, "registers": 168},
        {"block_v": 32, "blocks": 4, "num_warps": 2, "registers": 128},
        {"block_v": 64, "blocks": 2, "num_warps": 4},
        {"query_chunk": 32},
        {"query_chunk": 128},
        {"prepare_warps": 2},
    ]


def compile_slice(arguments: tuple[GdnShape, list[tuple[int, str]], int, list[dict[str, Any]]]) -> None:
    """Worker: fill Triton's disk cache for some configurations."""
    shape, cases, window, changes = arguments
    for nodes, kind in cases:
        problem = Problem(shape, 2, nodes, kind, window, sets=1)
        for change in changes:
            with contextlib.suppress(Exception):  # out of resources: shows again in the sweep
                problem.verify(0, problem.pending([0]), config=replace(default_for(nodes, window), **change))


def difference(change: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in change.items()) or "default"


def sweep(
    shapes: list[GdnShape],
    cases: list[tuple[int, str]],
    batches: list[int],
    window: int,
    budget_ms: float,
    workers: int,
) -> list[dict[str, Any]]:
    """Amortised time of every candidate; errors are checked for each."""
    changes = candidates()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_slice, [(s, cases, window, changes[k::workers]) for s in shapes for k in range(workers)])
    found = []
    for shape in shapes:
        for nodes, kind in cases:
            for change in changes:
                config = replace(default_for(nodes, window), **change)
                entry: dict[str, Any] = {"state": shape.state, "nodes": nodes, "kind": kind, "config": asdict(config)}
                try:
                    entry["errors"] = check_errors(shape, nodes, kind, window, None, config)
                    for batch in batches:
                        problem = Problem(shape, batch, nodes, kind, window, sets_for(batch * shape.state_bytes))
                        entry[batch] = time_ours(problem, config, budget_ms)
                        del problem
                except (Exception, SystemExit) as error:
                    print(f"{shape.state} N={nodes} {difference(change)}: {type(error).__name__} {error}"[:200])
                    continue
                found.append(entry)
                times = " | ".join(
                    f"B={batch} " + " ".join(f"{name} {value['us']:.1f}" for name, value in entry[batch].items())
                    for batch in batches
                )
                print(f"{shape.state} N={nodes} {difference(change):60s} {times}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--cases", nargs="+", default=["4:chain", "8:chain", "8:tree", "16:tree"], metavar="N:KIND")
    parser.add_argument("--windows", type=int, nargs="+", default=[16])
    parser.add_argument("--states", nargs="+", default=["fp32", "bf16"], choices=sorted(DTYPES))
    parser.add_argument("--heads", type=int, nargs=4, default=[16, 32, 128, 128], metavar=("H", "HV", "K", "V"))
    parser.add_argument("--config", nargs="*", default=[], metavar="FIELD=VALUE", help="changes to VerifyConfig")
    parser.add_argument("--budget-ms", type=float, default=100.0, help="device time of one timing")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead of a sweep")
    parser.add_argument("--json")
    options = parser.parse_args()
    cases = [(int(nodes), kind) for nodes, kind in (case.split(":") for case in options.cases)]
    shapes = [GdnShape(*options.heads, state=state) for state in options.states]
    record: dict[str, Any] = {"environment": environment(), "options": vars(options), "results": []}
    if options.sweep:
        record["results"] = sweep(
            shapes, cases, options.batches, options.windows[0], options.budget_ms, options.workers
        )
        write_record(options.json, record)
        return

    changes = {key: int(value) for key, value in (item.split("=") for item in options.config)}
    try:
        stock: Stock | None = Stock()
        record["note"] = "stock: sglang's kernels from PYTHONPATH"
    except ImportError as error:
        stock, record["note"] = None, f"stock baseline left out: {error}"
    for shape in shapes:
        for nodes, kind in cases:
            baseline: dict[int, Any] = {}
            for window in options.windows:
                config = replace(default_for(nodes, window), **changes) if changes else None
                errors = check_errors(shape, nodes, kind, window, stock, config)
                for batch in options.batches:
                    problem = Problem(shape, batch, nodes, kind, window, sets_for(batch * shape.state_bytes))
                    entry: dict[str, Any] = {"state": shape.state, "nodes": nodes, "kind": kind, "window": window}
                    entry |= {"batch": batch, "errors": errors, "ours": time_ours(problem, config, options.budget_ms)}
                    if window > 0:
                        entry["folds"] = time_folds(problem, options.budget_ms)
                    if stock is not None:
                        if batch not in baseline:
                            baseline[batch] = time_stock(stock, problem, kind != "chain", options.budget_ms)
                        entry["stock"] = baseline[batch]
                    record["results"].append(entry)
                    del problem
                    torch.cuda.empty_cache()
    record["config"] = {
        f"N={nodes} window={window}": asdict(replace(default_for(nodes, window), **changes))
        for (nodes, _), window in itertools.product(cases, options.windows)
    }
    write_record(options.json, record)

    print(record["note"])
    print(f"{shapes[0]}, us per layer, amortised at accept length N/2+1 (no fold, all rows fold)")
    print("state N kind  W batch | ours (no fold, all fold) + track | read GB/s | decode verify+scatter | ", end="")
    print("/decode stock/ours")
    for entry in record["results"]:
        ours = {name: value["us"] for name, value in entry["ours"].items()}
        shape = next(shape for shape in shapes if shape.state == entry["state"])
        line = f"{entry['state']} {entry['nodes']:2d} {entry['kind']} {entry['window']:2d} {entry['batch']:3d} | "
        folds = {name: value["us"] for name, value in entry.get("folds", {}).items()}
        whole = ours["amortised"] + folds.get("track", 0.0)
        line += f"{ours['amortised']:6.1f} ({ours['no fold']:6.1f} {ours['all fold']:6.1f}) "
        line += f"+ {folds.get('track', 0.0):.1f} | "
        line += f"{entry['batch'] * shape.state_bytes / ours['no fold'] / 1e3:5.0f} | "
        if "stock" in entry:
            base = {name: value["us"] for name, value in entry["stock"].items()}
            line += f"{base['decode']:5.1f} {base['verify']:6.1f}+{base['scatter']:.1f} | "
            line += f"{whole / base['decode']:.2f} {(base['verify'] + base['scatter']) / whole:.2f}"
        if folds:
            line += f" | settle {folds['settle']:.1f}"
        print(line)
    for key, entry in {(e["state"], e["nodes"], e["kind"], e["window"]): e for e in record["results"]}.items():
        print("error", *key, " ".join(f"{name} {error:.1e}" for name, error in entry["errors"].items()))


if __name__ == "__main__":
    main()
