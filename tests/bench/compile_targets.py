"""Every kernel at its default launch shape, compiled for A100, H100, B200 and RTX PRO 6000 without a GPU.

    python -m tests.bench.compile_targets [--capability 80 90 100 120] [WORD ...]    # only kernels with every word
    python -m tests.bench.compile_targets --kernels                  # which kernel each case compiles, and no more

A line a kernel, a column a compute capability: registers a thread, bytes spilled (stores and loads), bytes of shared
memory a block. Shapes are those of Qwen3-Next-80B and Nemotron-Nano-9B, batch 64 (of Mamba2's verify, which has a
kernel of its own for few rows and makes its own scores for some, one row and sixteen too), bf16 activations, default
windows that rewind to every token; "page 64": to multiples of 64, as with SGLang's defaults on a B200.
Exits with 1 if a block asks for more shared memory than such a GPU gives it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton
from mamba_mtp_kernels.common import draft_slots, move, plan, tree, turn, window
from mamba_mtp_kernels.common.operands import MAX_NODES
from mamba_mtp_kernels.conv1d import fold as conv_fold
from mamba_mtp_kernels.conv1d import verify_replay as conv_verify
from mamba_mtp_kernels.conv1d import verify_slots as conv_slots
from mamba_mtp_kernels.gdn.prepare_products import small_enough

from sglang_mamba_mtp.state.window import threshold_for, threshold_to_rewind
from tests.bench import compile_report as gdn
from tests.kernels import hopper
from tests.kernels.hopper import compiled, compiling_for, resources
from tests.kernels.mamba2 import compile_report as mamba2

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C++ programming guide)."""

BATCH = 64
DRAFTS = [
    *((nodes, "fp32", 1) for nodes in (4, 8, 16, 64)),
    (8, "bf16", 1),
    (4, "bf16", 64),
]
"""Draft nodes, the states' dtype and the page."""
STATES = ("fp32", "bf16")
NEMOTRON = (128, 80, 128, 8)
"""Heads, head dimension, state dimension, groups."""
CHANNELS = {"gdn": 8192, "mamba2": 12288}
"""Of the convolution."""
PARTS = {"gdn": (2048, 2048, 4096), "mamba2": (10240, 1024, 1024)}
"""Of these: q, k and v; x, B and C."""
RESULT = {"gdn": 0, "mamba2": 2}
"""The part that no window keeps."""
WIDTH = 4
NO_BIAS: dict[str, set[str]] = {"gdn": {"bias"}, "mamba2": set()}
"""What its kernels are not given."""

Report = Callable[[int], dict[str, int]]
"""What a kernel takes on a GPU of some capability, for which kernels are compiled at the time."""


def threshold(nodes: int, page: int) -> int:
    """Pending tokens that a verify replays in a default window that rewinds."""
    return max(threshold_for(None, nodes), threshold_to_rewind(nodes, page))


def used_by(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    odd: Collection[str] = (),
    absent: Collection[str] = (),
    registers: int = 0,
) -> dict[str, int]:
    """Of one kernel. odd: integers that 16 does not divide, beside those that are not looked at. absent: pointers that
    are None. registers: a thread's at most, 0: the compiler's choice."""
    pointers = {name: kind for name, kind in pointers.items() if name not in absent}
    constants = constants | dict.fromkeys(absent)
    unseen = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    found = compiled(
        kernel, pointers, constants, unspecialised=unseen | set(odd), num_warps=warps, max_registers=registers
    )
    return resources(found)


def i32(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


# -------------------------------------------------------------------------------------------------------- recurrence


def gdn_verify(nodes: int, state: str, page: int, kernel: int) -> Report:
    """kernel: 0 is prepare, 1 the verify."""
    pending = threshold(nodes, page)

    def report(capability: int) -> dict[str, int]:
        config = gdn.verify_module.default_config(
            nodes=nodes,
            values=gdn.V,
            exact=False,
            fold_threshold=pending,
            heads=BATCH * gdn.HV,
            narrow=state != "fp32",
            overlap=capability >= 90,
            products=small_enough(nodes, pending),
        )
        return gdn.verify_reports(nodes, pending, state, config)[kernel]()

    return report


def recurrences() -> Iterator[tuple[str, Report]]:
    for nodes, state, page in DRAFTS:
        name = f"N={nodes} {state} state" + (f" page {page}" if page > 1 else "")
        yield f"gdn prepare {name}", gdn_verify(nodes, state, page, 0)
        yield f"gdn verify {name}", gdn_verify(nodes, state, page, 1)
        shape = (*NEMOTRON, nodes, threshold(nodes, page), state, "bf16", BATCH)
        yield f"mamba2 verify {name}", lambda _, shape=shape: mamba2.mamba2(*shape)
        yield f"mamba2 scores {name}", lambda _, shape=shape: mamba2.scores(*shape)
        for rows, of_rows in ((1, "one row"), (16, "sixteen rows")):
            fewer = (*shape[:-1], rows)
            yield f"mamba2 verify of {of_rows} {name}", lambda _, shape=fewer: mamba2.mamba2(*shape)
    for state in STATES:
        yield f"gdn fold {state} state", lambda _, s=state: gdn.fold_report(s, False)
        yield f"mamba2 fold {state} state", lambda _, s=state: mamba2.fold(*NEMOTRON, s)
        for is_tree in (False, True):
            name = f"{'tree' if is_tree else 'chain'} {state} state"
            yield f"gdn slots {name}", lambda c, s=state, t=is_tree: gdn.slots_report(s, BATCH, t, False, c // 10 == 9)
            yield f"mamba2 slots {name}", lambda _, s=state, t=is_tree: mamba2.slots(*NEMOTRON, s, t, False)


# ------------------------------------------------------------------------------------------------------- convolution


def conv(capability: int, family: str, nodes: int, chain: bool, share: int = conv_verify.FEW_NODES) -> dict[str, int]:
    """share: nodes of a program."""
    constants = {
        **{f"WIDTH_{part}": width for part, width in enumerate(PARTS[family])}, "RESULT": RESULT[family],
        "N": nodes, "K": WIDTH, "NODES": min(nodes, share),
        "BLOCK_D": 256 if chain else conv_verify.TREE_BYTES // 2, "SILU": True, "CHAIN": chain, "PLACES": True,
        "WORDS": True, "HAS_BIAS": family == "mamba2", "stride_tok": 1, "OVERLAP": capability >= 90,
    }  # fmt: skip
    pointers = dict.fromkeys(("x", "y", "conv_states", "weight", "bias"), "bf16")
    pointers |= dict.fromkeys(("window_inputs", "first_kept", "second_kept"), "bf16")
    pointers |= i32("plan", "parents")
    odd = {"stride_plan", "stride_weight", "stride_state_dim"}
    registers = conv_verify.CHAIN_REGISTERS if chain else 0
    return used_by(conv_verify._conv1d_verify_kernel, pointers, constants, 2, odd, NO_BIAS[family], registers)


def conv_in_slots(family: str, nodes: int, is_tree: bool) -> dict[str, int]:
    block_n = triton.next_power_of_2(nodes)
    block_d = max(conv_slots.TILE // block_n, conv_slots.MIN_CHANNELS)
    constants = {
        "DIM": CHANNELS[family], "N": nodes, "K": WIDTH, "BLOCK_N": block_n, "BLOCK_D": block_d,
        "BLOCK_E": triton.next_power_of_2(block_d * (WIDTH - 1)), "SILU": True, "IS_TREE": is_tree,
        "HAS_BIAS": family == "mamba2", "stride_tok": 1,
    }  # fmt: skip
    pointers = dict.fromkeys(("x", "y", "conv_states", "weight", "bias"), "bf16")
    pointers |= i32("read_slots", "write_slots", "parents")
    absent = NO_BIAS[family] | (set() if is_tree else {"parents"})
    warps = max(4, block_n * block_d // 128)
    odd = {"stride_weight", "stride_state_dim"}
    return used_by(conv_slots._conv1d_verify_slots_kernel, pointers, constants, warps, odd, absent)


def conv_folds(capability: int, family: str, in_commit: bool, words: bool = True) -> dict[str, int]:
    """words: states lie as SGLang's pools have them."""
    constants = {"DIM": CHANNELS[family], "K": WIDTH, "BLOCK_D": conv_fold.BLOCK_CHANNELS, "stride_tok": 1}
    constants |= {"WORDS": words, "OVERLAP": capability >= 90, "BESIDE": in_commit and capability >= 90}
    pointers = dict.fromkeys(("conv_states", "inputs"), "bf16")
    pointers |= i32("order", "plan", "src_slots", "dst_slots", "rows", "counts")
    odd = {"capacity", "stride_plan", "stride_state_dim"}
    absent = {"src_slots", "dst_slots", "rows", "counts", "order"} if in_commit else {"plan"}
    return used_by(conv_fold._fold_conv_kernel, pointers, constants, 4, odd, absent)


def convolutions() -> Iterator[tuple[str, Report]]:
    for family in CHANNELS:
        for nodes in (4, 8, 16):
            for is_tree in (False, True):
                name = f"{family} {'tree' if is_tree else 'chain'} N={nodes}"
                yield f"conv1d verify {name}", lambda on, f=family, n=nodes, t=is_tree: conv(on, f, n, not t)
                if not is_tree and nodes > conv_verify.FEW_NODES:
                    share = conv_verify.MANY_NODES
                    yield (
                        f"conv1d verify {name} by {share}",
                        lambda on, f=family, n=nodes, s=share: conv(on, f, n, True, s),
                    )
                yield f"conv1d slots {name}", lambda _, f=family, n=nodes, t=is_tree: conv_in_slots(f, n, t)
        yield f"conv1d fold {family}", lambda on, f=family: conv_folds(on, f, False)
        yield f"conv1d fold in the commit {family}", lambda on, f=family: conv_folds(on, f, True)
        yield f"conv1d fold in the commit {family} by entries", lambda on, f=family: conv_folds(on, f, True, False)


# ------------------------------------------------------------------------------------------------------- bookkeeping


def build_tree(capability: int, nodes: int) -> dict[str, int]:
    constants = {"N": nodes, "BLOCK_N": triton.next_power_of_2(nodes), "OVERLAP": capability >= 90}
    pointers = {"parents": "i32", "ancestors": "i64", "next_token": "i64", "next_sibling": "i64"}
    return used_by(tree._build_tree_kernel, pointers, constants, 1)


def commit_window(capability: int, nodes: int, page: int, keeps_newest: bool = True) -> dict[str, int]:
    pending = threshold(nodes, page)
    capacity = pending + 2 * nodes
    constants = {
        "C": capacity, "N": nodes, "BLOCK_C": triton.next_power_of_2(capacity),
        "BLOCK_N": triton.next_power_of_2(nodes), "HAS_TRACK": False, "PAGE": page, "OVERLAP": capability >= 90,
    }  # fmt: skip
    pointers = i32("pending", "newest", "length", "window_row", "order", "slots", "parents", "track_count")
    pointers |= dict.fromkeys(("rows", "lengths", "last_correct"), "i64")
    absent = {"steps_to_track"} | (set() if keeps_newest else {"newest", "length", "lengths"})
    return used_by(window._commit_window_kernel, pointers, constants, 1, {"fold_threshold"}, absent)


def plan_rows(capability: int, nodes: int) -> dict[str, int]:
    pending = threshold(nodes, 1)
    constants = {
        "BLOCK_N": MAX_NODES, "STAY": pending, "BLOCK_STAY": triton.next_power_of_2(pending), "BLOCK_B": plan.OTHERS,
        "OVERLAP": capability >= 90,
    }  # fmt: skip
    pointers = i32("plan", "schedule", "slots", "pending", "newest", "order") | {"rows": "i64"}
    odd = {"fold_threshold", "capacity", "stride_plan", "batch", "nodes"}
    return used_by(plan._plan_rows_kernel, pointers, constants, 2, odd)


BOOKS = i32("current_input", "row_slot", "slot_row", "slots")


def place_nodes(nodes: int) -> dict[str, int]:
    constants = {"N": nodes, "BLOCK": draft_slots.BLOCK}
    pointers = BOOKS | i32("read_slots", "write_slots") | {"rows": "i64"}
    odd = {"first_draft_slot", "slots_per_row"}
    return used_by(draft_slots._place_nodes_kernel, pointers, constants, draft_slots.NUM_WARPS, odd)


def commit_slots(tracks: bool) -> dict[str, int]:
    constants = {"HAS_TRACK": tracks, "BLOCK": draft_slots.BLOCK}
    pointers = BOOKS | i32("write_slots", "track_src")
    pointers |= dict.fromkeys(("rows", "last_correct", "steps_to_track"), "i64")
    absent = () if tracks else ("steps_to_track",)
    return used_by(draft_slots._commit_slots_kernel, pointers, constants, draft_slots.NUM_WARPS, absent=absent)


def newest_slots() -> dict[str, int]:
    pointers = BOOKS | i32("newest")
    return used_by(draft_slots._newest_slots_kernel, pointers, {"BLOCK": draft_slots.BLOCK}, draft_slots.NUM_WARPS)


def forget_inputs() -> dict[str, int]:
    return used_by(draft_slots._forget_inputs_kernel, BOOKS, {"BLOCK": draft_slots.BLOCK}, draft_slots.NUM_WARPS)


SHARES = {"blocks", "tasks", "tasks_per_program"}
"""Of what launches over all layers give a program."""


def moved(size: int, state: str) -> dict[str, int]:
    itemsize = gdn.DTYPES[state].itemsize
    constants = {"SIZE": size, "BLOCK": min(move.BLOCK_BYTES // itemsize, triton.next_power_of_2(size))}
    pointers = {"states": state, "src_slots": "i64", "dst_slots": "i64"}
    return used_by(move._move_states_kernel, pointers, constants, move.NUM_WARPS, SHARES)


def turned(rows: int, columns: int, state: str) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    constants = {"TO": turn.KV, "R": rows, "C": columns, "BLOCK_R": turn.BLOCK_R, "BLOCK_C": block}
    pointers = {"states": state, "axis_order": "u8", "slots": "i64"}
    return used_by(turn._turn_states_kernel, pointers, constants, turn.warps_for(rows, block), SHARES)


def set_order() -> dict[str, int]:
    constants = {"TO": turn.KV, "BLOCK_B": turn.BLOCK_B}
    return used_by(turn._set_order_kernel, {"axis_order": "u8", "slots": "i64"}, constants, turn.BLOCK_B // 32)


def bookkeeping() -> Iterator[tuple[str, Report]]:
    for nodes in (8, 64):
        yield f"build tree N={nodes}", lambda on, n=nodes: build_tree(on, n)
    for nodes, page in ((4, 1), (8, 1), (64, 1), (4, 64)):
        name = f"N={nodes}" + (f" page {page}" if page > 1 else "")
        yield f"commit window {name}", lambda on, n=nodes, p=page: commit_window(on, n, p)
    yield "commit window N=8 folds all", lambda on: commit_window(on, 8, 1, False)
    for nodes in (4, 8):
        yield f"plan N={nodes}", lambda on, n=nodes: plan_rows(on, n)
    yield "place nodes N=8", lambda _: place_nodes(8)
    yield "commit slots", lambda _: commit_slots(False)
    yield "commit slots with tracking", lambda _: commit_slots(True)
    yield "newest slots", lambda _: newest_slots()
    yield "forget inputs", lambda _: forget_inputs()
    heads, headdim, dstate, _ = NEMOTRON
    sizes = {"gdn": (gdn.HV, gdn.V, gdn.K), "mamba2": (heads, headdim, dstate)}
    for family, (heads, rows, columns) in sizes.items():
        for state in STATES:
            name = f"{family} {state} state"
            yield f"move {name}", lambda _, n=heads * rows * columns, s=state: moved(n, s)
            yield f"turn {name}", lambda _, r=rows, c=columns, s=state: turned(r, c, s)
        yield f"move {family} conv1d", lambda _, f=family: moved(CHANNELS[f] * (WIDTH - 1), "bf16")
    yield "turn mamba2 fp32 state back", lambda _: turned(dstate, headdim, "fp32")
    yield "set order", lambda _: set_order()


def cases() -> Iterator[tuple[str, Report]]:
    yield from recurrences()
    yield from convolutions()
    yield from bookkeeping()


# ------------------------------------------------------------------------------------------------------------------


class _AboutToCompile(Exception):
    """Args: the kernel's module and name."""


def kernel_of(report: Report) -> str:
    """The kernel that a case compiles, as module.name; it is not compiled."""

    def stop(source: Any, **_: Any) -> NoReturn:
        function = source.fn.fn
        raise _AboutToCompile(f"{function.__module__.removeprefix('mamba_mtp_kernels.')}.{function.__name__}")

    with mock.patch.object(hopper, "compile", stop):
        try:
            report(90)
        except _AboutToCompile as found:
            return str(found)
    raise AssertionError("a case compiles nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100, 120], choices=list(SHARED))
    parser.add_argument("--kernels", action="store_true", help="only say which kernel each case compiles")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    asked = [(name, report) for name, report in cases() if all(word in name for word in args.words)]
    if args.kernels:
        for name, report in asked:
            print(f"{name:36s} {kernel_of(report)}")
        return 0
    print(f"Triton {triton.__version__}; registers, bytes spilled, bytes of shared memory a block")
    print(f"{'':36s}" + "".join(f"{f'sm_{capability}':>20s}" for capability in args.capability))
    too_large = []
    for name, report in asked:
        line = f"{name:36s}"
        for capability in args.capability:
            with compiling_for(capability):
                used = report(capability)
            if used["shared"] > SHARED[capability]:
                too_large.append(f"{name} on sm_{capability}")
            registers = used.get("limit", used["registers"])
            spilled = used.get("spilled under it", used["spilled"])
            line += f"{registers:8d} {spilled:4d} {used['shared']:6d}"
        print(line, flush=True)
    for name in too_large:
        print(f"more shared memory than there is: {name}")
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
