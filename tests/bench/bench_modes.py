"""The modes against each other and their peers on a GPU, in one run: SGLang's own verify ("stock"), slots, replay,
SGLang's `--enable-linear-replayssm-spec` ("replayssm") and FlashInfer's verify ("flashinfer") where they run.

    python tests/bench/bench_modes.py --json FILE               # the README's comparison, about two minutes on an H100
    python tests/bench/bench_modes.py --parts layouts moves     # only: VK against KV, copies and turns of whole slots
    python tests/bench/bench_modes.py --quick                   # one small case a family: does it run?
    python tests/bench/bench_modes.py --families gdn-bf16       # with states of 16 bits

Times are us per layer of a whole step (convolution, verify, commit) of LAYERS layers as a server runs it: one commit
for all layers, with track slots given as under SGLang's default radix strategy, replay's folds where they fall (accept
length N/2+1, rows at staggered phases of the window's cycle), bf16 inputs, float32 states or bf16 ones. A row's state
is tracked once in 256 tokens: where a batch passes 0.75 boundaries in a step on average, a quarter of the time is that
of a step without one and three quarters that of a step with one. "conv" includes what a mode prepares once a step;
"verify" is what verify adds to it. States are larger than the L2 cache together and rotated. Trees are combs: a path of
N/2 nodes below the root with a sibling leaf at every level.

"read" in the table: the time that reading every state once would take at the speed at which this GPU sums a large
tensor, over the time taken. "/ decode": over the time of SGLang's plain decode of one token a row, its convolution
included. Below the table, for each batch: plain decode, and what reading the states of a layer takes, and reading and
writing them in place, by a kernel that does nothing else.

Every configuration is compared with float64 first (errors at most twice SGLang's own; slots: SGLang's bits; peers: what
shows that they are called rightly) over several steps with folds and tracked states; nothing but the failure is printed
on red. Needs SGLang's kernels, 0.5.17's or 0.5.23's, on PYTHONPATH (stock.py says which).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from cases import TRACK_INTERVAL, GdnShape, Mamba2Shape, boundaries, rms_ratio, sets_for
from graph_timing import environment, import_kernels, time_launches, time_mixture, write_record

import_kernels()

from mamba_mtp_kernels.common import ops_for  # noqa: E402
from mamba_mtp_kernels.common.axis_order import KV, VK  # noqa: E402
from peers import PEERS, Decode, floors  # noqa: E402
from step import Drafts, Exact, Ours, Step, Stock, fill, make_layer  # noqa: E402
from stock import StockCommit  # noqa: E402

from sglang_mamba_mtp.config import MtpConfig  # noqa: E402

LAYERS = 8
SHAPES = {
    "gdn": GdnShape(),
    "mamba2": Mamba2Shape(),
    "gdn-bf16": GdnShape(state="bf16"),
    "mamba2-bf16": Mamba2Shape(state="bf16"),
}
PARTS = ("table", "floors", "layouts", "moves")
WINDOW = MtpConfig().window
"""None: by the size of the drafts."""
CEILING_BYTES = 2**30
DEVICE = torch.device("cuda")

CHECK_BATCH, CHECK_LAYERS, CHECK_STEPS = 8, 2, 6
ERROR_FACTOR = 2.0
SAME_BITS = ("slots",)
"""Modes whose every output, state and window has SGLang's bits."""

STATE_ERROR = 2e-6
"""A float32 state's error that is no error, whatever SGLang's is."""

PEER_ERROR = 2e-2
"""Of a peer, whose errors are its own: a call gone wrong has far larger ones."""


class Variant(NamedTuple):
    """A mode of ours, the layout it writes, and its window. "rewind" is replay as it runs unless told otherwise,
    "replay" as under SGLang's radix strategy (step.Ours)."""

    mode: str
    layout: str = "vk"
    window: int | None = None

    @property
    def name(self) -> str:
        layout = "" if self.layout == "vk" else f"-{self.layout}"
        return f"{self.mode}{layout}" + ("" if self.window is None else f"-{self.window}")


class Case(NamedTuple):
    family: str
    nodes: int
    kind: str


IN_TABLE = (Variant("slots"), Variant("replay"), Variant("rewind"))
IN_LAYOUTS = (Variant("slots"), Variant("replay"), Variant("slots", "kv"), Variant("replay", "kv"))


Way = Variant | str | None
"""How a step is done: a variant of ours, a peer's name, or None for SGLang's own."""


def name_of(way: Way) -> str:
    return "stock" if way is None else way if isinstance(way, str) else way.name


def open_step(way: Way, drafts: Drafts, *, layers: int, hollow: bool = False) -> Step:
    if way is None:
        return Stock(drafts, layers=layers, hollow=hollow)
    if isinstance(way, str):
        return PEERS[way](drafts, layers=layers, hollow=hollow)
    variant = way
    return Ours(
        drafts,
        variant.mode,
        layers=layers,
        window=WINDOW if variant.window is None else variant.window,
        state_layout=variant.layout,
        hollow=hollow,
    )


# ---------------------------------------------------------------------------------------------------------- correctness


class Errors:
    """RMS errors of several tensors together, relative to float64."""

    def __init__(self) -> None:
        self.squares: dict[str, list[float]] = {}

    def add(self, name: str, actual: torch.Tensor, exact: torch.Tensor) -> None:
        error = rms_ratio(actual, exact) * float(exact.norm())
        sums = self.squares.setdefault(name, [0.0, 0.0])
        sums[0] += error**2
        sums[1] += float(exact.norm()) ** 2

    def ratio(self, name: str) -> float:
        error, norm = self.squares[name]
        return (error / norm) ** 0.5


def peers_of(case: Case) -> tuple[list[str], dict[str, str]]:
    """(peers that run here, why the others do not)."""
    drafts = Drafts(make_layer(SHAPES[case.family], DEVICE), batch=1, nodes=case.nodes, kind=case.kind, sets=1)
    missing = {name: reason for name, peer in PEERS.items() if (reason := peer.why_not(drafts))}
    return [name for name in PEERS if name not in missing], missing


def check(case: Case, ways: Sequence[Variant | str]) -> dict[str, dict[str, float]]:
    """Run stock and the ways over the same drafts, several steps; errors by step and what. Exits on red."""
    drafts = Drafts(
        make_layer(SHAPES[case.family], DEVICE),
        batch=CHECK_BATCH,
        nodes=case.nodes,
        kind=case.kind,
        sets=1,
        seed=7,
        step_dtype=StockCommit().step_dtype,
    )
    parents = torch.tensor(drafts.parents, device=DEVICE)
    steps = {"stock": open_step(None, drafts, layers=CHECK_LAYERS)}
    steps |= {name_of(way): open_step(way, drafts, layers=CHECK_LAYERS) for way in ways}
    stock = steps["stock"]
    states, conv_states = (torch.randn_like(pool, dtype=torch.float32) for pool in (stock.states, stock.conv_states))
    conv_states = conv_states.to(stock.conv_states.dtype)
    exact = Exact(drafts, states, conv_states)
    for step in steps.values():
        fill(step, states, conv_states)

    same_bits = [way.name for way in ways if isinstance(way, Variant) and way.mode in SAME_BITS]
    errors = {name: Errors() for name in steps}
    differing: list[str] = []
    rows = torch.arange(CHECK_BATCH, dtype=torch.int32, device=DEVICE)
    for number in range(CHECK_STEPS):
        drafts.refill()
        for step in steps.values():
            step.prepare(0)
        for index in range(CHECK_LAYERS):
            convolved = {name: step.gathered(0, index, step.convolve(0, index)) for name, step in steps.items()}
            # all verifies get the same inputs
            y = convolved["stock"]
            scored = {name: step.score(0, index, step.given(0, index, y)) for name, step in steps.items()}
            true_conv, true_scores = exact.convolve(index), exact.score(index, convolved["stock"])
            for name in steps:
                errors[name].add("conv", convolved[name], true_conv)
                errors[name].add("verify", scored[name], true_scores)
            for what, outputs in (("conv", convolved), ("verify", scored)):
                differing += [
                    f"{name} {what} of step {number}, layer {index}: {int((outputs[name] != outputs['stock']).sum())}"
                    for name in same_bits
                    if not torch.equal(outputs[name], outputs["stock"])
                ]
        last = ((rows + number) % case.nodes).to(drafts.last.dtype)
        # of every third row the state before its last node, where there is one
        track = torch.where((rows + number) % 3 == 0, parents[last.long()].clamp(min=0), -1).to(last.dtype)
        for step in steps.values():
            step.commit(0, last, track)
        exact.commit(last, track)

    for name, step in steps.items():
        step.settle(0)
        tracked = (drafts.track_slots[0],) if getattr(step, "tracks", True) else ()
        slots = torch.cat([drafts.slots[0], *tracked]).long()
        errors[name].add("state", step.states[:, slots], exact.states[:, slots])
        if not torch.equal(step.conv_states[:, slots].double(), exact.conv_states[:, slots]):
            differing.append(f"{name} conv windows at the end")
        if name in same_bits and not torch.equal(step.states[:, slots], stock.states[:, slots]):
            differing.append(f"{name} states at the end")
    found = {name: {what: e.ratio(what) for what in ("conv", "verify", "state")} for name, e in errors.items()}

    def limit(name: str, what: str) -> float:
        if name in PEERS:
            return PEER_ERROR
        return max(ERROR_FACTOR * found["stock"][what], STATE_ERROR * (what == "state"))

    high = {
        f"{name} {what}": error
        for name, of_step in found.items()
        for what, error in of_step.items()
        if name != "stock" and not error <= limit(name, what)
    }
    if differing or high:
        sys.exit(f"RED {case}: too far from float64: {high}; not SGLang's bits: {differing}; errors {found}")
    return found


# --------------------------------------------------------------------------------------------------------------- timing


def all_layers(step: Step, which: int, *, verify: bool) -> None:
    step.prepare(which)
    for index in range(LAYERS):
        y = step.convolve(which, index)
        if verify:
            step.score(which, index, y)


def whole_step(step: Step, which: int, last: torch.Tensor, track: torch.Tensor) -> None:
    all_layers(step, which, verify=True)
    step.commit(which, last, track)


def stagger(step: Any, drafts: Drafts) -> None:
    """Spread the rows evenly over the phases of a window's cycle: row r commits r mod its length times."""
    cycle = step.phases
    for number, which in itertools.product(range(cycle), range(drafts.sets)):
        phase = (which * drafts.batch + torch.arange(drafts.batch, device=DEVICE)) % cycle
        whole_step(step, which, torch.where(phase > number, drafts.last, -1), drafts.tracked(0))


def time_step(step: Step, drafts: Drafts, budget_ms: float) -> dict[str, Any]:
    """us per layer: quantiles of the whole step, medians of its parts."""
    fill(step, torch.randn_like(step.states[:, : drafts.first_draft_slot]), step.conv_states[:, :1])
    if not isinstance(step, Stock):
        stagger(step, drafts)

    def per_layer(result: dict[str, float]) -> dict[str, float]:
        return {name: value / LAYERS if name.startswith("us") else value for name, value in result.items()}

    def timed(launch: Callable[[int], None]) -> dict[str, float]:
        return per_layer(time_launches([partial(launch, which) for which in range(drafts.sets)], budget_ms=budget_ms))

    fewer, share = boundaries(drafts.batch, len(drafts.accepted))

    def timed_commit(launch: Callable[[int, torch.Tensor], None]) -> dict[str, float]:
        """timed, of a launch that gets the nodes to track."""

        def launches(rows: int) -> list[Callable[[], None]]:
            return [partial(launch, which, drafts.tracked(rows)) for which in range(drafts.sets)]

        return per_layer(time_mixture(launches, fewer, share, budget_ms=budget_ms))

    whole = timed_commit(lambda which, track: whole_step(step, which, drafts.last, track))
    conv = timed(lambda which: all_layers(step, which, verify=False))["us"]
    verify = timed(lambda which: all_layers(step, which, verify=True))["us"] - conv
    commit = timed_commit(lambda which, track: step.commit(which, drafts.last, track))["us"]
    return {**whole, "tracked rows": fewer + share, "parts": {"conv": conv, "verify": verify, "commit": commit}}


def read_ceiling(budget_ms: float) -> float:
    """GB/s at which this GPU sums a tensor much larger than its L2 cache."""
    tensor = torch.zeros(CEILING_BYTES // 4, device=DEVICE)
    return tensor.nbytes / time_launches([tensor.sum] * 2, budget_ms=budget_ms)["us"] / 1e3


def time_floors(family: str, batch: int, budget_ms: float) -> dict[str, Any]:
    """us per layer, quantiles: SGLang's plain decode, and what moves the states of a batch and does nothing else."""
    shape = SHAPES[family]
    sets = sets_for(batch * LAYERS * shape.state_bytes, at_least=1)
    drafts = Drafts(make_layer(shape, DEVICE), batch=batch, nodes=1, kind="chain", sets=sets)
    step = Decode(drafts, layers=LAYERS)
    fill(step, torch.randn_like(step.states), step.conv_states[:, :1])

    def timed(launch: Callable[[int], None]) -> dict[str, float]:
        result = time_launches([partial(launch, which) for which in range(sets)], budget_ms=budget_ms)
        return {name: value / LAYERS if name.startswith("us") else value for name, value in result.items()}

    whole = timed(partial(all_layers, step, verify=True))
    conv = timed(partial(all_layers, step, verify=False))["us"]
    result: dict[str, Any] = {"family": family, "batch": batch, "sets": sets}
    result["decode"] = {**whole, "parts": {"conv": conv, "decode": whole["us"] - conv}}
    states = step.states[:, : sets * batch].flatten(2).clone().view(LAYERS, sets, -1)
    moves = [floors(states[index, which]) for which in range(sets) for index in range(LAYERS)]
    for name in ("read", "copy"):
        result[name] = time_launches([move[name] for move in moves], budget_ms=budget_ms)
    return result


def time_case(case: Case, batch: int, ways: Sequence[Way], budget_ms: float) -> Iterator[dict[str, Any]]:
    shape = SHAPES[case.family]
    sets = sets_for(batch * LAYERS * shape.state_bytes, at_least=1)
    drafts = Drafts(
        make_layer(shape, DEVICE),
        batch=batch,
        nodes=case.nodes,
        kind=case.kind,
        sets=sets,
        step_dtype=StockCommit().step_dtype,
    )
    for way in ways:
        step = open_step(way, drafts, layers=LAYERS)
        result = time_step(step, drafts, budget_ms)
        yield {**case._asdict(), "batch": batch, "sets": sets, "step": name_of(way), **result}
        del step
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def time_moves(family: str, slots: int, budget_ms: float) -> dict[str, Any]:
    """turn_states and move_states over the states of `slots` slots in LAYERS layers: us a call, GB/s read and written;
    idle: us of a call that finds nothing to do."""
    shape, ops = SHAPES[family], ops_for(DEVICE)
    states = torch.randn(LAYERS, 2 * slots + 1, *shape.temporal, device=DEVICE)
    order = torch.full((2 * slots + 1,), VK, dtype=torch.uint8, device=DEVICE)
    first, second = torch.arange(1, 2 * slots + 1, dtype=torch.int32, device=DEVICE).view(2, slots)
    nowhere = torch.zeros_like(first)
    calls: dict[str, list[Callable[[], None]]] = {
        "turn": [partial(ops.turn_states, states, order, slots=first, to=bit) for bit in (KV, VK)],
        "turn idle": [partial(ops.turn_states, states, order, slots=first, to=VK)] * 2,
        "move": [partial(ops.move_states, states, src_slots=a, dst_slots=b) for a, b in ((first, second),) * 2],
        "move idle": [partial(ops.move_states, states, src_slots=first, dst_slots=nowhere)] * 2,
    }
    result: dict[str, Any] = {"family": family, "slots": slots, "layers": LAYERS}
    for name, launches in calls.items():
        result[name] = time_launches(launches, budget_ms=budget_ms)
        if "idle" not in name:
            result[name]["GB/s"] = 2 * slots * LAYERS * shape.state_bytes / result[name]["us"] / 1e3
    return result


# -------------------------------------------------------------------------------------------------------------- compile


def compile_kernels(task: tuple[Case, Way, Sequence[int]]) -> None:
    """Worker: fill Triton's disk cache with what one step at some batch sizes needs."""
    case, way, batches = task
    for batch in batches:
        with contextlib.suppress(Exception):  # shows again in the checks
            run_hollow(case, way, batch)
            torch.cuda.synchronize()


def run_hollow(case: Case, way: Way, batch: int) -> None:
    """Launch what a step launches, over next to no memory."""
    layer = make_layer(SHAPES[case.family], DEVICE)
    step_dtype = StockCommit().step_dtype
    drafts = Drafts(layer, batch=batch, nodes=case.nodes, kind=case.kind, sets=1, step_dtype=step_dtype)
    step = open_step(way, drafts, layers=LAYERS, hollow=True)
    step.prepare(0)
    step.score(0, 0, step.convolve(0, 0))
    step.commit(0, drafts.last, drafts.tracked(1))
    step.settle(0)


def compile_ahead(plan: dict[Case, tuple[Variant | str, ...]], batches: Sequence[int], workers: int) -> None:
    tasks = [(case, way, sorted(batches)) for case, ways in plan.items() for way in (None, *ways)]
    with multiprocessing.get_context("spawn").Pool(min(workers, len(tasks))) as pool:
        pool.map(compile_kernels, tasks, chunksize=1)


# ----------------------------------------------------------------------------------------------------------------- main


def summary(entry: dict[str, Any]) -> str:
    parts = entry["parts"]
    return f"{entry['us']:7.1f} ({parts['conv']:.1f}+{parts['verify']:.1f}+{parts['commit']:.1f})"


def print_table(
    entries: Sequence[dict[str, Any]], names: Sequence[str], ceiling: float, decode: dict[tuple[str, int], float]
) -> None:
    """A line for each configuration; ratios are stock's time over each other step's, or where stock is missing VK's;
    read is the share of the read ceiling (GB/s) that each step has. decode: us of plain decode by family and batch."""
    configurations = dict.fromkeys((e["family"], e["nodes"], e["kind"], e["batch"]) for e in entries)
    steps = " | ".join(f"{name} (conv+verify+commit)" for name in names)
    print(f"family N kind batch | {steps} | {names[0]} / each | read | / decode")
    for key in configurations:
        family, nodes, kind, batch = key
        found = {e["step"]: e for e in entries if (e["family"], e["nodes"], e["kind"], e["batch"]) == key}
        us = {name: entry["us"] for name, entry in found.items()}
        ratios = line_of({name: us[names[0]] / us[name] for name in us}, names[1:])
        at_least = batch * SHAPES[family].state_bytes / ceiling / 1e3
        read = line_of({name: at_least / us[name] for name in us}, names)
        plain = decode.get((family, batch))
        times = line_of({name: us[name] / plain for name in us} if plain else {}, names)
        steps = " | ".join(summary(found[name]) if name in found else "-" for name in names)
        print(f"{family:6s} {nodes} {kind} {batch:3d} | {steps} | {ratios} | {read} | {times}")


def line_of(figures: dict[str, float], names: Sequence[str]) -> str:
    return " ".join(f"{figures[name]:.2f}" if name in figures else "-" for name in names)


def print_floors(entries: Sequence[dict[str, Any]], ceiling: float) -> None:
    print("family batch | plain decode (conv+decode) | read, share of the ceiling | copy in place")
    for entry in entries:
        decode, read, copy = (entry[name]["us"] for name in ("decode", "read", "copy"))
        parts = entry["decode"]["parts"]
        share = entry["batch"] * SHAPES[entry["family"]].state_bytes / ceiling / 1e3 / read
        line = f"{decode:7.1f} ({parts['conv']:.1f}+{parts['decode']:.1f}) | {read:.1f} {share:.2f} | {copy:.1f}"
        print(f"{entry['family']:6s} {entry['batch']:3d} | {line}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--families", nargs="+", default=["gdn", "mamba2"], choices=list(SHAPES))
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kinds", nargs="+", default=["chain", "tree"], choices=["chain", "tree"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--layout-batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--windows", type=int, nargs="+", default=[], help="of replay that rewinds, beside the default")
    parser.add_argument("--slots", type=int, default=64, help="slots that are moved and turned")
    parser.add_argument("--budget-ms", type=float, default=25.0, help="device time of one timing")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead; 0: none")
    parser.add_argument("--quick", action="store_true", help="one small case a family")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    if options.quick:
        options.nodes, options.kinds, options.batches, options.layout_batches = [4], ["chain"], [2], [2]
        options.slots, options.budget_ms = 4, 5.0

    started = time.perf_counter()
    cases = [Case(*key) for key in itertools.product(options.families, options.nodes, options.kinds)]
    chains = [Case(family, nodes, "chain") for family in options.families for nodes in options.nodes]
    in_table = (*IN_TABLE, *(Variant("rewind", window=window) for window in options.windows))
    plan: dict[Case, tuple[Variant | str, ...]] = {}
    peers, missing = {}, {}
    if "table" in options.parts:
        for case in cases:
            peers[case], missing[case] = peers_of(case)
            plan[case] = (*in_table, *peers[case])
    if "layouts" in options.parts:
        plan |= {case: tuple(dict.fromkeys((*plan.get(case, ()), *IN_LAYOUTS))) for case in chains}
    if options.workers and plan:
        compile_ahead(plan, {*options.batches, *options.layout_batches}, min(options.workers, os.cpu_count() or 1))
    seconds = {"compile": time.perf_counter() - started}

    record: dict[str, Any] = {"environment": environment(), "options": vars(options)}
    record |= {"layers": LAYERS, "window": WINDOW, "shapes": {name: vars(shape) for name, shape in SHAPES.items()}}
    record |= {"track_interval": TRACK_INTERVAL, "read_ceiling_GB/s": read_ceiling(options.budget_ms)}
    record["missing"] = [{**case._asdict(), "why": why} for case, why in missing.items()]
    record["errors"] = [{**case._asdict(), "steps": check(case, ways)} for case, ways in plan.items()]
    seconds["check"] = time.perf_counter() - started - seconds["compile"]

    def results(ways: dict[Case, tuple[Way, ...]], batches: Sequence[int]) -> list[Any]:
        return [
            entry
            for case in ways
            for batch in batches
            for entry in time_case(case, batch, ways[case], options.budget_ms)
        ]

    if "table" in options.parts:
        record["table"] = results({case: (None, *in_table, *peers[case]) for case in cases}, options.batches)
    if "floors" in options.parts:
        pairs = itertools.product(options.families, options.batches)
        record["floors"] = [time_floors(family, batch, options.budget_ms) for family, batch in pairs]
    if "layouts" in options.parts:
        record["layouts"] = results(dict.fromkeys(chains, IN_LAYOUTS), options.layout_batches)
    if "moves" in options.parts:
        record["moves"] = [time_moves(family, options.slots, options.budget_ms) for family in options.families]
    seconds["time"] = time.perf_counter() - started - sum(seconds.values())
    record["seconds"] = seconds
    write_record(options.json, record)

    ceiling = record["read_ceiling_GB/s"]
    found = record["environment"]
    print(f"SGLang {found.get('sglang')}, commit {found.get('commit')}, {found.get('gpu')}, reads {ceiling:.0f} GB/s")
    print(f"us per layer of a step of {LAYERS} layers; {seconds}")
    decode = {(entry["family"], entry["batch"]): entry["decode"]["us"] for entry in record.get("floors", ())}
    if "table" in record:
        print_table(record["table"], ["stock", *(variant.name for variant in in_table), *PEERS], ceiling, decode)
    for reasons in dict.fromkeys(f"{name}: {why}" for entry in record["missing"] for name, why in entry["why"].items()):
        print(reasons)
    if "floors" in record:
        print_floors(record["floors"], ceiling)
    for mode in ("slots", "replay") if "layouts" in record else ():
        print_table(record["layouts"], [mode, f"{mode}-kv"], ceiling, decode)
    for entry in record.get("moves", ()):
        words = [f"{name} {entry[name]['us']:.0f} us {entry[name]['GB/s']:.0f} GB/s" for name in ("turn", "move")]
        words += [f"{name} {entry[name]['us']:.1f} us" for name in ("turn idle", "move idle")]
        print(f"{entry['family']}: {entry['slots']} slots x {LAYERS} layers: {', '.join(words)}")


if __name__ == "__main__":
    main()
