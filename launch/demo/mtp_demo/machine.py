"""What ran this: versions, processor, GPU, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

COMMIT = "BENCH_COMMIT"  # for a checkout that is no git repository, or not the one it was copied from
PACKAGES = ("sglang", "sglang-mamba-mtp", "torch", "triton", "transformers", "flashinfer-python")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def hardware(device: str) -> dict[str, Any]:
    """kind, name and, of a GPU, driver and memory."""
    found: dict[str, Any] = {"kind": device, "cpu": _processor(), "cpu_cores": os.cpu_count()}
    if device == "cuda":
        fields = ("name", "driver_version", "memory.total")
        line = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]).splitlines()
        values = [value.strip() for value in line[0].split(",")] if line else ["unknown"] * len(fields)
        found["gpus"] = len(line)
        found.update(zip(("gpu", "driver", "gpu_memory"), values, strict=True))
    return found


def commit(root: Path) -> str | None:
    """What BENCH_COMMIT says, or the checkout's commit, with ``+`` if files differ from it; None outside git."""
    if told := os.environ.get(COMMIT):
        return told
    head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]).strip()
    changed = _output(["git", "-C", str(root), "status", "--porcelain"]).strip()
    return (head + ("+" if changed else "")) if head else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
