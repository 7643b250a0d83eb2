"""Timing of kernel launches through CUDA graphs, and the record every benchmark writes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def import_kernels() -> None:
    """Make `mamba_mtp_kernels` and `sglang_mamba_mtp` importable from this checkout where they are not installed."""
    try:
        import mamba_mtp_kernels.common  # noqa: F401
    except ImportError:
        package = types.ModuleType("mamba_mtp_kernels")
        package.__path__ = [str(ROOT / "kernels")]
        sys.modules["mamba_mtp_kernels"] = package
    if importlib.util.find_spec("sglang_mamba_mtp") is None:
        sys.path.append(str(ROOT))


def time_launches(launches: Sequence[Callable[[], Any]], *, budget_ms: float = 250.0) -> dict[str, float]:
    """Microseconds a launch, quantiles over replays of one graph that runs `launches` in turn.

    The launches should touch different memory, together more than the L2 cache holds.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:  # compiles every specialisation before the capture
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    replays = max(7, min(200, int(budget_ms / max(begin.elapsed_time(end), 1e-3))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([begin.elapsed_time(end) for begin, end in events], dtype=torch.float64)
    times = times * 1000 / len(launches)
    low, median, high = torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {"us": median, "us_p10": low, "us_p90": high, "replays": replays, "launches": len(launches)}


def time_mixture(
    launches: Callable[[int], Sequence[Callable[[], Any]]], fewer: int, share: float, **options: Any
) -> dict[str, float]:
    """time_launches of launches(fewer) and of launches(fewer + 1), the latter counted by its share of the steps."""
    few, more = (time_launches(launches(fewer + n), **options) for n in (0, 1))
    return {name: us + share * (more[name] - us) if name.startswith("us") else us for name, us in few.items()}


def commit() -> str | None:
    """What BENCH_COMMIT says, or the git commit of this checkout, "-dirty" after it where tracked files differ."""
    if told := os.environ.get("BENCH_COMMIT"):
        return told
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, Any]:
    """GPU, versions and commit of this run."""
    import triton
    from stock import sglang_version

    properties = torch.cuda.get_device_properties(0)
    return {
        "commit": commit(),
        "sglang": sglang_version(),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_record(path: str | None, record: dict[str, Any]) -> None:
    """Write the record as JSON (nothing where no path is given)."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n")
