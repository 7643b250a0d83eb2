"""What only a GPU can show of the tests: many of them at once on all GPUs of a machine, under a time limit.

    python tests/bench/on_gpus.py --list
    python tests/bench/on_gpus.py --out FOLDER                                  # all of `JOBS`, in their order
    python tests/bench/on_gpus.py hicache-gdn two_ranks --limit 560 --out FOLDER

A job that measures has a GPU to itself, one that needs two waits until no GPU is held so, the others share what is
left. Every log is written to FOLDER as it comes and a line of summary.txt as soon as a job ends, so that nothing is
lost where the machine is taken away. At the limit what still runs is ended, and told. The interpreter must have SGLang
(drift, counters and sanitizers do without).

Exit status: 0 if every job ended with 0, 1 if one did not, 2 for wrong flags.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENDING = 8.0
"""Seconds before the limit at which what runs is ended."""


@dataclass(frozen=True)
class Job:
    """A command, ``{out}`` in it for the folder. gpus: how many it needs; alone: it shares them with nobody."""

    command: tuple[str, ...]
    gpus: int = 1
    alone: bool = False


def _tests(*arguments: str, gpus: int = 1) -> Job:
    return Job((sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *arguments), gpus)


_ENGINE, _FEATURES = "tests/engine/test_gpu.py", "tests/engine/test_gpu_features.py"
FAMILIES = ("gdn", "mamba2")

JOBS: dict[str, Job] = {
    "counters": Job((sys.executable, "tests/bench/counters.py", "--json", "{out}/counters.json"), alone=True),
    **{
        f"hicache-{family}": _tests("-m", "gpu", "tests/engine/test_host_cache.py", "-k", f"on_a_gpu and {family}")
        for family in FAMILIES
    },
    "drafts": _tests("-m", "gpu", _FEATURES, "-k", "nodes64 or standalone or eagle3 or dflash"),
    "narrow": _tests("-m", "gpu", _FEATURES, "-k", "narrow"),
    "compile": _tests("-m", "gpu", _FEATURES, "-k", "compile"),
    "data_parallel": _tests("-m", "gpu", _FEATURES, "-k", "data_parallel", gpus=2),
    "two_ranks": _tests("-m", "gpu", _ENGINE, "-k", "two_ranks", gpus=2),
    "kits-gdn": _tests("tests/test_few_shot_gsm8k.py", "-k", "gdn-chain"),
    "kits-mamba2": _tests("--slow", "tests/test_few_shot_gsm8k.py", "-k", "mamba2-tree-rewind"),
    **{
        f"drift-{family}": _tests(
            "--slow", "-m", "gpu", "tests/kernels/test_stock_drift.py", "-k", f"drift_is_no_larger and {family}"
        )
        for family in FAMILIES
    },
    "metrics": _tests("tests/metrics/test_server.py"),
    "quick": _tests("-m", "gpu", _ENGINE, "-k", "not two_ranks"),
    "warm_up": _tests("-m", "gpu", "tests/engine/test_warm_up.py", "tests/engine/test_sleep.py"),
    "faults": _tests("tests/faults", "-k", "scheduler"),
    "stress": _tests("--slow", "-m", "gpu", "tests/engine/test_stress.py"),
    "long": _tests("--slow", "-m", "gpu", "tests/engine/test_long.py"),
    **{f"slow-{family}": _tests("-m", "gpu and slow", _ENGINE, "-k", f"float32 and {family}") for family in FAMILIES},
    "sanitize": Job((sys.executable, "tests/bench/sanitize.py", "--quick", "--out", "{out}/sanitize"), gpus=2),
}


def gpus_here() -> int:
    """GPUs that ``nvidia-smi`` lists, or that CUDA_VISIBLE_DEVICES names."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([each for each in named.split(",") if each.strip()])
    try:
        told = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in told.splitlines())


@dataclass
class Running:
    """A started job, where, and since when."""

    name: str
    job: Job
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    began: float


def places(job: Job, running: Sequence[Running], gpus: int, turn: int) -> tuple[int, ...] | None:
    """GPUs on which ``job`` may start now; None if it has to wait. ``turn``: of those that share, who comes first."""
    held = {gpu for each in running if each.job.alone for gpu in each.gpus}
    busy = {gpu for each in running for gpu in each.gpus}
    free = [gpu for gpu in range(gpus) if gpu not in (busy if job.alone else held)]
    if len(free) < job.gpus:
        return None
    start = turn % len(free)
    return tuple(sorted((free[start:] + free[:start])[: job.gpus]))


def summary(log: Path) -> Iterator[str]:
    """What of a log is worth a line: pytest's failures and its last line."""
    lines = log.read_text(errors="replace").splitlines()
    yield from (line[:160] for line in lines if re.match(r"(FAILED|ERROR) ", line))
    ends = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    yield from ends[-1:] or lines[-1:]


class Runner:
    """Runs jobs; ``told`` is the summary file."""

    def __init__(self, jobs: Mapping[str, Job], gpus: int, out: Path) -> None:
        self.waiting, self.gpus, self.out = dict(jobs), gpus, out
        self.running: list[Running] = []
        self.told, self.failed = out / "summary.txt", False
        self._turns = itertools.count()

    def run(self, until: float) -> bool:
        """Whether all ended well by ``until``, of `time.monotonic`."""
        while self.waiting or self.running:
            self._reap()
            self._start()
            if time.monotonic() > until:
                self._end()
                break
            time.sleep(0.2)
        return not self.failed

    def _start(self) -> None:
        for name, job in list(self.waiting.items()):
            if job.gpus > self.gpus:
                self._tell(name, f"not run: it needs {job.gpus} GPUs, here are {self.gpus}")
                del self.waiting[name]
                continue
            where = places(job, self.running, self.gpus, next(self._turns))
            if where is None:
                continue
            del self.waiting[name]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, where))}
            command = [word.replace("{out}", str(self.out)) for word in job.command]
            with (self.out / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
                )
            self.running.append(Running(name, job, where, process, time.monotonic()))

    def _reap(self) -> None:
        for each in [each for each in self.running if each.process.poll() is not None]:
            self.running.remove(each)
            status = each.process.returncode
            self.failed |= status != 0
            took = f"{time.monotonic() - each.began:.0f} s on GPU {','.join(map(str, each.gpus))}"
            self._tell(each.name, f"status {status}, {took}", *summary(self.out / f"{each.name}.log"))

    def _end(self) -> None:
        """The time is up."""
        self.failed |= bool(self.running or self.waiting)
        for each in self.running:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
            self._tell(each.name, "cut off by the time limit", *summary(self.out / f"{each.name}.log"))
        for name in self.waiting:
            self._tell(name, "not begun: the time was up")
        self.running, self.waiting = [], {}

    def _tell(self, name: str, *lines: str) -> None:
        text = "".join(f"{head:<16} {line}\n" for head, line in zip((name, *[""] * len(lines)), lines, strict=False))
        print(text, end="", flush=True)
        with self.told.open("a") as file:
            file.write(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="of --list; all by default")
    parser.add_argument("--list", action="store_true", help="print the jobs")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="in all (default 3600)")
    parser.add_argument("--out", type=Path, help="folder for the logs")
    options = parser.parse_args(argv)
    if options.list:
        for name, job in JOBS.items():
            print(f"{name:<16} {job.gpus} GPU(s){' alone' if job.alone else ''}: {' '.join(job.command[1:])}")
        return 0
    if unknown := set(options.jobs) - set(JOBS):
        parser.error(f"{', '.join(sorted(unknown))}: no such job; --list says which there are")
    if options.out is None:
        parser.error("--out: the folder for the logs is missing")
    until = time.monotonic() + options.limit - ENDING
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: JOBS[name] for name in JOBS if not options.jobs or name in options.jobs}
    return 0 if Runner(chosen, gpus_here(), options.out.resolve()).run(until) else 1


if __name__ == "__main__":
    raise SystemExit(main())
