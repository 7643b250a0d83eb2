"""What bounds each of our kernels, by Nsight Compute's hardware counters on a GPU.

    python tests/bench/counters.py --seconds 480 --json FILE         # the shortfalls, some 40 seconds each on an H200
    python tests/bench/counters.py --cases gdn:4:chain:64 mamba2:16:tree:32
    python tests/bench/counters.py --quick                           # two cases: does it run?
    python tests/bench/counters.py --show FILE                       # the tables of a record again, anywhere

Three processes, one after the other: one compiles, one times CUDA graphs without a profiler (a layer of a whole step
of 8 as bench_modes.py runs it, rows at staggered phases of the windows' cycle; what reads, and what reads and writes a
layer's states and does nothing else; an empty kernel, which is what a launch costs), and one runs under `ncu`
(counted.py, ncu.py). There every case is stepped to where no row folds, where every row folds and to staggered rows;
then the kernels of a step's head, of one of its layers and of its commit are profiled, each alone and from cold caches:
their times add up to more than a step's where one kernel's output would still lie in the cache for the next. A head's
and a commit's kernels serve 8 layers.

"bound by" is read off the figures (ncu.bound): DRAM where a kernel reaches 85 % of what the kernel that only reads
reaches, a unit at 80 % of its peak, else latency, with what warps wait for. Plain decode is there where SGLang is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ncu

HERE = Path(__file__).parent
MARK = "_empty_kernel"
FAMILIES = ("gdn", "mamba2", "gdn-bf16", "mamba2-bf16")
INSTALLED = "/opt/nvidia/nsight-compute/2025.3.1/ncu"
DEFAULT = (
    "gdn:4:chain:64", "gdn:8:chain:64", "gdn:16:tree:64", "gdn:4:chain:32", "gdn:8:chain:32", "gdn:16:tree:32",
    "gdn-bf16:4:chain:64", "gdn-bf16:8:chain:64", "mamba2:16:tree:64", "gdn:4:chain:1", "gdn:4:chain:8",
)  # fmt: skip
QUICK = ("gdn:4:chain:8", "mamba2:4:chain:8")


def parse_case(text: str) -> list[Any]:
    """family:nodes:kind:batch."""
    family, nodes, kind, batch = text.split(":")
    if family not in FAMILIES or kind not in ("chain", "tree"):
        raise argparse.ArgumentTypeError(f"{text}: expected FAMILY:NODES:chain or tree:BATCH, families {FAMILIES}")
    return [family, int(nodes), kind, int(batch)]


def child(what: str, *more: str) -> list[str]:
    return [sys.executable, str(HERE / "counted.py"), what, *more]


def pair(regions: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each region that launched anything, with its kernels, and the time of the empty one as "launch_us".

    Raises ValueError where marks and regions are not as many.
    """
    marks = [number for number, kernel in enumerate(kernels) if kernel["kernel"] == MARK]
    if len(marks) != len(regions) or (kernels and marks[:1] != [0]):
        raise ValueError(f"{len(regions)} regions, but {len(marks)} marks among {len(kernels)} kernels")
    ends = [*marks[1:], len(kernels)]
    paired = [
        {**region, "launch_us": kernels[mark]["us"], "kernels": list(kernels[mark + 1 : end])}
        for region, mark, end in zip(regions, marks, ends, strict=True)
    ]
    return [region for region in paired if region["kernels"]]


def judge(regions: Sequence[dict[str, Any]]) -> None:
    """Give every kernel "bound" and the GB/s that it moves. DRAM's reference is the kernel that only reads the states
    of as many rows, or where a fifth of the bytes are written the one that writes them too."""
    reached = {(r["step"], r["family"], r["batch"]): r["kernels"][0]["dram"] or 100.0 for r in regions}
    for region in regions:
        for kernel in region["kernels"]:
            read, written = kernel["bytes_read"] or 0.0, kernel["bytes_written"] or 0.0
            move = "copy" if written > 0.2 * (read + written) else "read"
            dram = reached[move, region["family"], region["batch"]]
            kernel["bound"] = ncu.bound(kernel, dram=dram, launch_us=region["launch_us"] or 0.0)
            kernel["gbps"] = (read + written) / kernel["us"] / 1e3 if kernel["us"] else None


def cell(value: float | None, width: int, digits: int = 0) -> str:
    return f"{value:{width}.{digits}f}" if value is not None else f"{'-':>{width}s}"


def kernel_line(kernel: dict[str, Any]) -> str:
    mega = [None if kernel[name] is None else kernel[name] / 1e6 for name in ("bytes_read", "bytes_written")]
    columns = [cell(kernel["us"], 7, 1), cell(mega[0], 7, 1), cell(mega[1], 7, 1)]
    columns += [cell(kernel[name], 4) for name in ("dram", "l2", "issue", "tensor", "sm_active")]
    columns += [f"{cell(kernel['occupancy'], 3)}/{cell(kernel['occupancy_possible'], 3)}", cell(kernel["registers"], 4)]
    columns += [cell(kernel["waves"], 6, 1)]
    return f"{kernel['kernel'][:25]:25s} {' '.join(columns)}  {kernel['bound']}"


def name_of(region: dict[str, Any]) -> str:
    if region["step"] != "ours":
        return f"{region['family']} batch {region['batch']}: {region['step']}"
    head = f"{region['family']} N={region['nodes']} {region['kind']} batch {region['batch']}"
    return f"{head}: {region['phase']} ({region['folding']} of {region['batch']})"


def print_tables(record: dict[str, Any]) -> None:
    print("MB read and written; per cent of peak: DRAM, L2, issue slots, tensor pipe; sm: time at work; warps of all")
    print(
        "part   kernel                         us    read written dram   l2 issu tens   sm warps/most regs waves bound"
    )
    for name, regions in itertools.groupby(record["regions"], key=name_of):
        print(name)
        for region in regions:
            for kernel in region["kernels"]:
                print(f"{region['part']:6s} {kernel_line(kernel)}")
    print("\nthe longest kernel of a layer: us, DRAM, issue slots, warps and what bounds it")
    for region in record["regions"]:
        if region["part"] == "layer":
            longest = max(region["kernels"], key=lambda kernel: kernel["us"] or 0.0)
            figures = [cell(longest["us"], 6, 1), *(cell(longest[name], 3) for name in ("dram", "issue", "occupancy"))]
            print(f"{name_of(region):52s} {' '.join(figures)} {longest['bound']}")
    empty = record["times"]["empty_us"]
    floors = {(floor["family"], floor["batch"]): floor for floor in record["times"]["floors"]}
    print(f"\nus a layer of a whole step, in CUDA graphs; a chain of empty kernels takes {empty:.2f} us each")
    print("case                               step  kernels  launches   read   copy  decode")
    for step in record["times"]["steps"]:
        floor = floors[step["family"], step["batch"]]
        per_layer = launches_of(record["regions"], step)
        least = [cell(per_layer, 8, 1), cell(None if per_layer is None else per_layer * empty, 9, 1)]
        moved = [cell(floor.get(name), 6, 1) for name in ("read", "copy", "decode")]
        case = f"{step['family']} N={step['nodes']} {step['kind']} batch {step['batch']}"
        print(f"{case:32s} {step['us']:6.1f} {' '.join([*least, *moved])}")


def launches_of(regions: Sequence[dict[str, Any]], step: dict[str, Any]) -> float | None:
    """Kernels that a layer of this step launches, a head's and a commit's by their share; None where the profiler did
    not get to it."""
    case = ("family", "nodes", "kind", "batch")
    ours = [r for r in regions if r["step"] == "ours" and all(r[name] == step[name] for name in case)]
    once = [r for r in ours if r["phase"] == ours[0]["phase"]]
    shares = [len(r["kernels"]) / (1 if r["part"] == "layer" else r["layers"]) for r in once]
    return sum(shares) if shares else None


def profile(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], int, str, str]:
    """(regions planned, ncu's exit status, its log, what the program said)."""
    regions, log = folder / "regions", folder / "log"
    tiny = [sys.executable, "-c", "import torch; torch.ones(9, device='cuda').sum()"]
    program = child("profile", str(folder / "cases"), str(regions), str(options.seconds))
    command = ncu.command(options.ncu, ncu.available(options.ncu, tiny), str(log), program)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    planned = [json.loads(line) for line in regions.read_text().splitlines()] if regions.exists() else []
    return planned, done.returncode, log.read_text() if log.exists() else "", done.stdout


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=parse_case, default=[parse_case(case) for case in DEFAULT])
    parser.add_argument("--quick", action="store_true", help=f"only {' '.join(QUICK)}")
    parser.add_argument("--ncu", default=shutil.which("ncu") or INSTALLED)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no other case is profiled")
    parser.add_argument("--json")
    parser.add_argument("--show", type=Path, help="print the tables of a record and do nothing else")
    options = parser.parse_args(argv)
    if options.show:
        print_tables(json.loads(options.show.read_text()))
        return
    if options.quick:
        options.cases = [parse_case(case) for case in QUICK]

    started, seconds = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases").write_text(json.dumps(options.cases))
        for what in ("compile", "time"):
            subprocess.run(child(what, str(folder / "cases"), str(folder / "times")), check=True)
            seconds[what] = round(time.perf_counter() - started - sum(seconds.values()), 1)
        times = json.loads((folder / "times").read_text())
        planned, status, log, said = profile(options, folder)
        seconds["profile"] = round(time.perf_counter() - started - sum(seconds.values()), 1)
    complaints = f"ncu ended with {status}; {ncu.errors(log + said)[:5]}\n{said[-2000:]}"
    try:
        regions = pair(planned, ncu.read(log))
    except ValueError as error:
        sys.exit(f"counters.py: {error}; {complaints}")
    if not regions:
        sys.exit(f"counters.py: nothing was profiled; {complaints}")
    judge(regions)
    asked = {"cases": options.cases, "seconds": options.seconds}
    record = {"environment": times.pop("environment"), "options": asked, "metrics": ncu.METRICS}
    record |= {"seconds": seconds, "ncu": {"status": status, "says": ncu.errors(log)[:20]}}
    record |= {"times": times, "regions": regions}
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    print_tables(record)
    found = record["environment"]
    print(f"{found.get('gpu')}, commit {found.get('commit')}, SGLang {found.get('sglang')}; seconds {seconds}")
    if status or "no time left" in said:
        sys.exit(complaints)


if __name__ == "__main__":
    main()
