"""Every kernel at its default launch shape, compiled for A100, H100, B200 and RTX PRO 6000 without a GPU.

    python -m tests.bench.compile_targets [--capability 80 90 100 120] [WORD ...]    # only kernels with every word

A line a kernel, a column a compute capability: registers a thread, bytes spilled (stores and loads), bytes of shared
memory a block. Shapes are those of Qwen3-Next-80B and Nemotron-Nano-9B, batch 64, bf16 activations, default windows.
Exits with 1 if a block asks for more shared memory than such a GPU gives it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton

from sglang_mamba_mtp.state.window import threshold_for
from tests.bench import compile_report as gdn
from tests.kernels.hopper import compiling_for
from tests.kernels.mamba2 import compile_report as mamba2

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C++ programming guide)."""

BATCH = 64
NODES = {"fp32": (4, 8, 16, 64), "bf16": (8,)}
"""Draft nodes, by the states' dtype."""
NEMOTRON = (128, 80, 128, 8)
"""Heads, head dimension, state dimension, groups."""

Report = Callable[[int], dict[str, int]]
"""What a kernel takes on a GPU of some capability, for which kernels are compiled at the time."""


def gdn_verify(nodes: int, state: str, kernel: int) -> Report:
    """kernel: 0 is prepare, 1 the verify."""
    window = threshold_for(None, nodes)

    def report(capability: int) -> dict[str, int]:
        config = gdn.verify_module.default_config(
            nodes=nodes,
            values=gdn.V,
            exact=False,
            fold_threshold=window,
            heads=BATCH * gdn.HV,
            narrow=state != "fp32",
            overlap=capability >= 90,
        )
        return gdn.verify_reports(nodes, window, state, config)[kernel]

    return report


def cases() -> Iterator[tuple[str, Report]]:
    for state, drafts in NODES.items():
        for nodes in drafts:
            name = f"N={nodes} {state} state"
            yield f"gdn prepare {name}", gdn_verify(nodes, state, 0)
            yield f"gdn verify {name}", gdn_verify(nodes, state, 1)
            window = threshold_for(None, nodes)
            yield (
                f"mamba2 verify {name}",
                lambda _, n=nodes, w=window, s=state: mamba2.mamba2(*NEMOTRON, n, w, s, "bf16", BATCH),
            )
        yield f"gdn fold {state} state", lambda _, s=state: gdn.fold_report(s, False)
        yield f"mamba2 fold {state} state", lambda _, s=state: mamba2.fold(*NEMOTRON, s)
        for tree in (False, True):
            name = f"{'tree' if tree else 'chain'} {state} state"
            yield f"gdn slots {name}", lambda c, s=state, t=tree: gdn.slots_report(s, BATCH, t, False, c // 10 == 9)
            yield f"mamba2 slots {name}", lambda _, s=state, t=tree: mamba2.slots(*NEMOTRON, s, t, False)
    yield "conv1d verify N=8", lambda _: mamba2.conv(8192, 4, 8, 4)
    yield "conv1d fold", lambda _: mamba2.conv_folds(8192, 4, False)
    yield "conv1d fold in the commit", lambda _: mamba2.conv_folds(8192, 4, True)
    yield "build tree N=64", lambda _: mamba2.tree(64)
    yield "commit window N=8", lambda _: mamba2.commit(8, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100, 120], choices=list(SHARED))
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    print(f"Triton {triton.__version__}; registers, bytes spilled, bytes of shared memory a block")
    print(f"{'':36s}" + "".join(f"{f'sm_{capability}':>20s}" for capability in args.capability))
    too_large = []
    for name, report in cases():
        if not all(word in name for word in args.words):
            continue
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
