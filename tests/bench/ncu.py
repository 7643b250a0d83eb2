"""Nsight Compute as a command: what it is asked, how its CSV is read, and what figures say bounds a kernel."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
"""Why a warp does not issue; "selected" is the one cycle in which it does."""

METRICS = {
    "us": "gpu__time_duration.sum",
    "bytes_read": "dram__bytes_read.sum",
    "bytes_written": "dram__bytes_write.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm_active": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_possible": "sm__maximum_warps_per_active_cycle_pct",
    "latency": "smsp__average_warp_latency_per_inst_issued.ratio",
    "registers": "launch__registers_per_thread",
    "programs": "launch__grid_size",
    "threads": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    **{f"stall_{reason}": STALL.format(reason) for reason in STALLS},
}
"""What a figure of a kernel is called here, and there. Percentages are of the GPU's peak: "dram", "l2" and "sm_active"
over the kernel's time, the others while a multiprocessor has work; stalls are warp cycles an issued instruction."""

MADE_BY_NCU = ("launch__", "sm__maximum_warps_per_active_cycle_pct")

BUSY = 80.0
"""Percent of its peak from which a unit bounds a kernel."""

NEAR = 0.85
"""Share of what a kernel that only moves states reaches of DRAM's peak from which DRAM bounds another."""


def known(wanted: Sequence[str], listing: str) -> list[str]:
    """Those metrics of a GPU's units that `ncu --query-metrics` lists by their first part (all, where it lists none);
    those that ncu makes itself are in no list."""
    names = {line.split()[0] for line in listing.splitlines() if line.strip()}
    if not any(name.startswith("dram__") for name in names):
        return list(wanted)
    return [metric for metric in wanted if metric.startswith(MADE_BY_NCU) or metric.split(".")[0] in names]


def errors(text: str) -> list[str]:
    """What ncu complained of."""
    return [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]


def available(ncu: str, tiny: Sequence[str]) -> list[str]:
    """Metrics of METRICS that this ncu measures on this GPU, by its list and by profiling a tiny program."""
    listing = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False).stdout
    metrics = known([*METRICS.values()], listing)
    while True:
        command = [ncu, "--clock-control", "none", "--launch-count", "1", "--metrics", ",".join(metrics), *tiny]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        complaints = " ".join(errors(tried.stdout + tried.stderr))
        left = [metric for metric in metrics if metric not in complaints]
        if len(left) in (0, len(metrics)):
            if gone := {*METRICS.values()} - {*metrics}:
                print(f"ncu does not measure here: {', '.join(sorted(gone))}", file=sys.stderr, flush=True)
            return metrics
        metrics = left


def command(ncu: str, metrics: Sequence[str], log: str, program: Sequence[str]) -> list[str]:
    """Profile, between a program's calls of cudaProfilerStart and Stop, each kernel alone, from cold caches, over as
    many passes as the metrics take (what it wrote is put back in between), at the clocks as they are."""
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
        "--log-file", log, "--force-overwrite", "--target-processes", "all",
        "--profile-from-start", "off", "--replay-mode", "kernel", "--cache-control", "all", "--clock-control", "none",
        "--metrics", ",".join(metrics), *program,
    ]  # fmt: skip


def read(text: str) -> list[dict[str, Any]]:
    """The kernels of a log in the order of their launches: "kernel", and what METRICS names (None where it was not
    measured), "us" in microseconds. Lines that ncu says beside the table are left out."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    kernels: list[tuple[int, dict[str, Any]]] = []
    units = dict.fromkeys(METRICS, 1.0)
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(lines)
        for row in csv.DictReader(lines[start:end]):
            if not row["ID"]:
                units = {name: _factor(row.get(metric) or "") for name, metric in METRICS.items()}
                continue
            figures = {name: _number(row.get(metric), units[name]) for name, metric in METRICS.items()}
            kernels.append((int(row["ID"]), {"kernel": row["Kernel Name"].split("(")[0], **figures}))
    return [figures for _, figures in sorted(kernels, key=lambda kernel: kernel[0])]


def _factor(unit: str) -> float:
    """From ncu's unit to us or bytes; 1 where it is neither a time's nor a size's."""
    seconds = {"n": 1e-3, "u": 1.0, "m": 1e3}
    sizes = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
    if unit in ("ns", "us", "ms", "nsecond", "usecond", "msecond"):
        return seconds[unit[0]]
    return sizes.get(unit.removesuffix("byte"), 1.0) if unit.endswith("byte") else 1.0


def _number(cell: str | None, factor: float) -> float | None:
    try:
        value = float((cell or "").replace(",", "")) * factor
    except ValueError:
        return None
    return value if value == value else None


def stalls(figures: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(reason, share of the cycles that a warp passes between two instructions), longest first; the issue itself is
    no waiting."""
    times = {reason: figures.get(f"stall_{reason}") or 0.0 for reason in STALLS}
    total = sum(times.values())
    waits = [(reason, time / total) for reason, time in times.items() if time and reason != "selected"]
    return sorted(waits, key=lambda wait: -wait[1])


def bound(figures: Mapping[str, Any], *, dram: float, launch_us: float) -> str:
    """What bounds a kernel, in words. dram: percent of DRAM's peak that reading the states alone reaches in this run;
    launch_us: what an empty kernel takes under the profiler."""

    def of(name: str) -> float:
        return figures.get(name) or 0.0

    if of("us") <= 1.5 * launch_us:
        return "its launch"
    if of("dram") >= NEAR * dram:
        return f"DRAM ({of('dram'):.0f} of {dram:.0f} %)"
    busy = max(("l2", "l1", "issue", "tensor", "fma", "alu"), key=of)
    if of(busy) >= BUSY:
        return f"{busy} ({of(busy):.0f} %)"
    waits = ", ".join(f"{reason} {share:.0%}" for reason, share in stalls(figures)[:2])
    few = f"{of('programs'):.0f} programs, {of('waves'):.1f} waves; " if of("waves") < 1 else ""
    return f"latency: {few}{of('occupancy'):.0f} % of warps, waiting for {waits or 'what was not measured'}"
