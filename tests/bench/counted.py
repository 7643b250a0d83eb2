"""The processes that counters.py starts: compile the kernels of its cases, time them, or run them for a profiler.

    python tests/bench/counted.py compile|time|profile CASES.json OUT [SECONDS]

CASES.json is a list of [family, nodes, kind, batch]. "time" writes JSON; "profile" a line of JSON a region, each before
its kernels run between cudaProfilerStart and Stop, and after SECONDS it begins no other case: a profiler that is ended
from outside tells nothing. Every region begins with an empty kernel, so that kernels in the order of their launches
tell where a region begins.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from bench_modes import LAYERS, SHAPES
from cases import sets_for
from graph_timing import environment, time_launches
from peers import Decode, floors
from step import Drafts, Ours, fill, make_layer

WORKERS = 14
MODE = "rewind"
NO_ROW, EVERY_ROW, MIX = "no row folds", "every row folds", "staggered"
EMPTY_KERNELS = 64


class Case(NamedTuple):
    family: str
    nodes: int
    kind: str
    batch: int


@triton.jit
def _empty_kernel():
    pass


def device() -> torch.device:
    return torch.device("cuda")


def open_case(case: Case, *, sets: int = 1, hollow: bool = False) -> tuple[Drafts, Ours]:
    layer = make_layer(SHAPES[case.family], device())
    drafts = Drafts(layer, batch=case.batch, nodes=case.nodes, kind=case.kind, sets=sets)
    return drafts, Ours(drafts, MODE, layers=LAYERS, window=None, hollow=hollow)


def open_decode(family: str, batch: int, *, sets: int = 1, hollow: bool = False) -> Decode:
    """Raises ImportError where SGLang is missing."""
    drafts = Drafts(make_layer(SHAPES[family], device()), batch=batch, nodes=1, kind="chain", sets=sets)
    return Decode(drafts, layers=LAYERS, hollow=hollow)


def layers_of(step: Any, which: int) -> None:
    """Convolution and recurrence of all layers."""
    step.prepare(which)
    for index in range(LAYERS):
        step.score(which, index, step.convolve(which, index))


def whole_step(step: Ours, which: int, last: torch.Tensor) -> None:
    """last is the track too: where states are rewound nobody looks at it."""
    layers_of(step, which)
    step.commit(which, last, last)


# ------------------------------------------------------------------------------------------------------------ the cycle


def counts(drafts: Drafts, step: Ours) -> list[int]:
    """Pending tokens of the first batch's rows. Waits for the device."""
    return step.store.pending[drafts.slots[0].long()].tolist()


def bring_to(phase: str, drafts: Drafts, step: Ours) -> bool:
    """Step from settled states until the next verify of the first batch is of this kind, well into the windows' cycle;
    False where it never is. Of those in which no row folds, the one with most pending tokens."""
    threshold, cycle, rows = (
        step.store.shape.threshold,
        step.phases,
        torch.arange(drafts.batch, device=drafts.last.device),
    )
    for number in range(cycle):
        late = rows % cycle > number if phase == MIX else torch.zeros_like(rows, dtype=torch.bool)
        whole_step(step, 0, torch.where(late, drafts.last, -1))
    for number in range(3 * cycle + 1):
        pending = counts(drafts, step)
        folds = [count > threshold for count in pending]
        # the last before a fold: another step's tokens pass the threshold
        last_before = not any(folds) and max(pending) + len(drafts.accepted) > threshold
        found = {NO_ROW: last_before, EVERY_ROW: all(folds), MIX: True}[phase]
        if number >= 2 * cycle and found:
            return True
        whole_step(step, 0, drafts.last)
    return False


# ------------------------------------------------------------------------------------------------------- what it is for


def compile_one(task: tuple[str, Case]) -> None:
    """Fill Triton's disk cache with what a case launches, over next to no memory."""
    what, case = task
    with contextlib.suppress(Exception):  # shows again where it is needed
        if what == "decode":
            layers_of(open_decode(case.family, case.batch, hollow=True), 0)
        else:
            drafts, step = open_case(case, hollow=True)
            whole_step(step, 0, drafts.last)
        torch.cuda.synchronize()


def compile_cases(cases: list[Case]) -> None:
    alike = {(case.family, case.batch): case for case in cases}.values()
    tasks = [("step", case) for case in cases] + [("decode", case) for case in alike]
    with multiprocessing.get_context("spawn").Pool(min(WORKERS, len(tasks), os.cpu_count() or 1)) as pool:
        pool.map(compile_one, tasks, chunksize=1)


def time_cases(cases: list[Case]) -> dict[str, Any]:
    """Graphs, us: a launch of an empty kernel; by case a layer of the step, and what reads or copies a layer's states
    and does nothing else; plain decode where SGLang is there."""
    empty: list[Callable[[], Any]] = [partial(_empty_kernel[(1,)], num_warps=4)] * EMPTY_KERNELS
    result: dict[str, Any] = {"environment": environment(), "empty_us": time_launches(empty, budget_ms=10)["us"]}
    result["steps"] = [time_case(case) for case in cases]
    alike = {(case.family, case.batch): None for case in cases}
    result["floors"] = [time_floors(*key) for key in alike]
    return result


def time_case(case: Case) -> dict[str, Any]:
    sets = sets_for(case.batch * LAYERS * SHAPES[case.family].state_bytes, at_least=1)
    drafts, step = open_case(case, sets=sets)
    fill(step, torch.randn_like(step.states), step.conv_states[:, :1])
    for number, which in itertools.product(range(step.phases), range(sets)):
        late = (which * case.batch + torch.arange(case.batch, device=device())) % step.phases > number
        whole_step(step, which, torch.where(late, drafts.last, -1))
    launches = [partial(whole_step, step, which, drafts.last) for which in range(sets)]
    us = time_launches(launches, budget_ms=25)["us"] / LAYERS
    torch.cuda.empty_cache()
    return {**case._asdict(), "us": us, "sets": sets, "accept": len(drafts.accepted), "phases": step.phases}


def time_floors(family: str, batch: int) -> dict[str, Any]:
    shape = SHAPES[family]
    sets = sets_for(batch * LAYERS * shape.state_bytes, at_least=1)
    states = torch.randn(LAYERS * sets, batch * shape.state_bytes // 4, device=device())
    moves = [floors(layer) for layer in states]
    found: dict[str, Any] = {"family": family, "batch": batch, "bytes": batch * shape.state_bytes}
    for name in ("read", "copy"):
        found[name] = time_launches([move[name] for move in moves], budget_ms=10)["us"]
    del states, moves
    with contextlib.suppress(ImportError):
        step = open_decode(family, batch, sets=sets)
        fill(step, torch.randn_like(step.states), step.conv_states[:, :1])
        found["decode"] = (
            time_launches([partial(layers_of, step, which) for which in range(sets)], budget_ms=10)["us"] / LAYERS
        )
    torch.cuda.empty_cache()
    return found


class Regions:
    """Profiled regions, each written down before it runs."""

    def __init__(self, out: Path) -> None:
        self.out = out
        out.write_text("")

    @contextlib.contextmanager
    def region(self, **what: Any) -> Iterator[None]:
        with self.out.open("a") as file:
            file.write(json.dumps(what) + "\n")
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        _empty_kernel[(1,)](num_warps=4)
        yield
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile_cases(cases: list[Case], out: Path, seconds: float) -> None:
    """What moves states, then, case by case and phase by phase, what a step launches once for its layers ("head"), one
    of these, and the commit of all: a region each."""
    ends, regions = time.monotonic() + seconds, Regions(out)
    for family, batch in {(case.family, case.batch): None for case in cases}:
        profile_floors(regions, family, batch)
        torch.cuda.empty_cache()
    for case in cases:
        if time.monotonic() > ends:
            print(f"no time left for {case}", flush=True)
            continue
        profile_case(regions, case)
        torch.cuda.empty_cache()


def profile_case(regions: Regions, case: Case) -> None:
    drafts, step = open_case(case)
    states = torch.randn_like(step.states)
    for phase in (NO_ROW, EVERY_ROW, MIX):
        step.store.renew()
        fill(step, states, step.conv_states[:, :1])
        if (phase == MIX and min(step.phases, case.batch) == 1) or not bring_to(phase, drafts, step):
            continue
        folding = sum(count > step.store.shape.threshold for count in counts(drafts, step))
        about = {"step": "ours", **case._asdict(), "phase": phase, "folding": folding, "layers": LAYERS}
        with regions.region(**about, part="head"):
            step.prepare(0)
            step.plan(0)
        with regions.region(**about, part="layer"):
            step.score(0, 1, step.convolve(0, 1))
        for index in (0, *range(2, LAYERS)):
            step.score(0, index, step.convolve(0, index))
        with regions.region(**about, part="commit"):
            step.commit(0, drafts.last, drafts.last)


def profile_floors(regions: Regions, family: str, batch: int) -> None:
    """What moves states and does nothing else, and plain decode where SGLang is there."""
    shape = SHAPES[family]
    about = {"family": family, "batch": batch, "part": "layer"}
    moves = floors(torch.randn(batch * shape.state_bytes // 4, device=device()))
    for name, move in moves.items():
        move()
        with regions.region(step=name, **about):
            move()
    with contextlib.suppress(ImportError):
        step = open_decode(family, batch)
        fill(step, torch.randn_like(step.states), step.conv_states[:, :1])
        layers_of(step, 0)
        with regions.region(step="decode", **about):
            step.score(0, 0, step.convolve(0, 0))


def main(what: str, cases_path: str, out: str, seconds: str = "inf") -> None:
    cases = [Case(*case) for case in json.loads(Path(cases_path).read_text())]
    if what == "compile":
        compile_cases(cases)
    elif what == "time":
        Path(out).write_text(json.dumps(time_cases(cases)))
    elif what == "profile":
        profile_cases(cases, Path(out), float(seconds))
    else:
        sys.exit(f"counted.py: {what!r}, expected compile, time or profile")


if __name__ == "__main__":
    main(*sys.argv[1:])
