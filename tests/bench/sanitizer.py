"""compute-sanitizer as a command: how a tool is started, what its log reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

WITHOUT_CACHE = ("memcheck", "initcheck")
"""Tools that know memory by its allocations: PyTorch's caching allocator, which hands out its own, is off for them."""

NOT_OURS = ",".join(f"kns={part}" for part in ("_ZN2at", "_ZN3cub", "_ZN7cutlass", "at_cuda_detail", "cublas"))
"""Kernels that are not looked at, by parts of their (mangled) names. Filters for kernels by name would leave ours out:
those that are loaded as code made at run time are not found by them. initcheck looks at all: what nobody sees written
is not initialised."""

REPORT = re.compile(r"^========= (?! )(.+)$")
PLACE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?([A-Za-z_][\w:]*)")
SUMMARY = re.compile(r"^========= (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY|No CUDA-API|Target application|Program hit|No attachable process|Using "
)
KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)


class Finding(NamedTuple):
    """What was reported, and the kernel in which ("" where it was in none)."""

    what: str
    kernel: str


class Log(NamedTuple):
    """Findings as they were printed, and how many the tool counted; None where it did not come to its end."""

    findings: list[Finding]
    total: int | None


def command(tool: str, log: Path | str, program: Sequence[str], *, exclude: bool = True) -> list[str]:
    """log: where %p stands for a process. exclude: leave kernels of others out, where the tool can do without them."""
    options = ["--tool", tool, "--target-processes", "all", "--print-limit", "100", "--log-file", str(log)]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # a test sees those that matter; PyTorch asks what may be refused
    if exclude and tool != "initcheck":
        options += ["--kernel-name-exclude", NOT_OURS]
    return ["compute-sanitizer", *options, *program]


def environment(tool: str, *, graphs: bool) -> dict[str, str]:
    """graphs: tests that capture CUDA graphs, which PyTorch cannot without its caching allocator."""
    return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in WITHOUT_CACHE and not graphs else {}


def read(text: str) -> Log:
    findings: list[Finding] = []
    total = None
    awaits_place = False
    for line in text.splitlines():
        if summary := SUMMARY.match(line):
            total = (total or 0) + int(summary[1] or summary[2] or 0)
        elif report := REPORT.match(line):
            awaits_place = False
            if not NO_REPORT.match(report[1]):
                by_host = report[1].startswith("Host API")
                place = None if by_host else PLACE.search(report[1])
                what = re.sub(r"0x[0-9a-f]+", "#", re.split(r" (?:at|by) ", report[1])[0])
                findings.append(Finding(what, place[1] if place else ""))
                awaits_place = place is None and not by_host
        elif awaits_place and (place := PLACE.search(line)):
            findings[-1] = findings[-1]._replace(kernel=place[1])
            awaits_place = False
    return Log(findings, total)


def our_kernels(kernels: Path) -> set[str]:
    """Names of the kernels in this folder."""
    return {name for file in kernels.rglob("*.py") for name in KERNEL.findall(file.read_text())}
