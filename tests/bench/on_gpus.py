"""What only a GPU can show of the tests: many of them at once on all GPUs of a machine, under a time limit.

    python tests/bench/on_gpus.py --list
    python tests/bench/on_gpus.py --limit 560 --out FOLDER two_ranks data_parallel sleep counters hicache-gdn-kernel
    python tests/bench/on_gpus.py --limit 560 --out /tmp/logs --pack FILE.tar.gz stress-gdn-replay compile sanitize
    python tests/bench/on_gpus.py --out FOLDER                                  # all of `JOBS`, in their order

A job that measures has its GPUs to itself, the others share what is left, each on the GPU with the least to do. Every
log is written to FOLDER as it comes and a line of summary.txt as soon as a job ends, so that nothing is lost where the
machine is taken away. At the limit what still runs is ended, and told; engines that have not begun by then are not.
Nothing needs to be installed but what SGLang needs (drift, counters and sanitizers do without): the plugin's entry
point and a ``sglang`` command are made where there are none.

Exit status: 0 if every job ended with 0, 1 if one did not, 2 for wrong flags, or if the plugin cannot be found.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "launch" / "demo"))

from mtp_demo import plugin_site  # noqa: E402 - the path first
from mtp_demo.server import die_with_parent, with_byte_code  # noqa: E402

ENDING = 12.0
"""Seconds before the limit at which what runs is ended."""

LAST_WORDS = 5.0
"""Seconds that what is ended has to say what it found so far."""

FIND = """
from importlib.metadata import entry_points
import mamba_mtp_kernels
(found,) = {entry.value for entry in entry_points(group="sglang.srt.plugins") if entry.name == "mamba_mtp"}
"""
"""Fails where SGLang would not find the plugin."""

COMMAND = """
import sys
from sglang.cli.main import main

if __name__ == "__main__":  # a server's processes are spawned, which runs this file again
    sys.exit(main())
"""
"""What jobs find as ``sglang``."""

TOGETHER = 20
"""Engines that share a GPU, unless one job has more: they are tiny, and two GPUs come with 32 cores."""


@dataclass(frozen=True)
class Job:
    """A command, ``{out}`` in it for the folder. gpus: how many it needs; alone: it shares them with nobody; engines:
    how many processes it has on them at once."""

    command: tuple[str, ...]
    gpus: int = 1
    alone: bool = False
    engines: int = 2


def _tests(*arguments: str, gpus: int = 1, alone: bool = False, engines: int = 2) -> Job:
    return Job((sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", *arguments), gpus, alone, engines)


_ENGINE, _FEATURES = "tests/engine/test_gpu.py", "tests/engine/test_gpu_features.py"
FAMILIES = ("gdn", "mamba2")
ALL_AT_ONCE = 8
"""Engines of a module that starts all of its own before its first test."""

JOBS: dict[str, Job] = {
    "two_ranks": _tests("-m", "gpu", _ENGINE, "-k", "two_ranks", gpus=2, engines=ALL_AT_ONCE),
    "data_parallel": _tests("-m", "gpu", _FEATURES, "-k", "data_parallel", gpus=2, engines=ALL_AT_ONCE),
    "expert_parallel": _tests("-m", "gpu", _FEATURES, "-k", "expert_parallel", gpus=2),
    # The sleep test reads how much of a GPU is free, and counters count everybody's work.
    "sleep": _tests("-m", "gpu", "tests/engine/test_sleep.py", alone=True),
    "counters": Job((sys.executable, "tests/bench/counters.py", "--json", "{out}/counters.json"), alone=True),
    **{
        f"long-{family}-{mode}": _tests(
            "--slow", "-m", "gpu", "tests/engine/test_long.py", "-k", f"on_a_gpu and {family} and {mode}", engines=3
        )
        for family in FAMILIES
        for mode in ("replay", "slots")
    },
    **{
        f"stress-{family}-{mode}": _tests(
            "--slow", "-m", "gpu", "tests/engine/test_stress.py", "-k", f"on_a_gpu and {family} and {mode}"
        )
        for family in FAMILIES
        for mode in ("replay", "slots")
    },
    **{
        f"hicache-{family}-{copies}": _tests(
            "-m", "gpu", "tests/engine/test_host_cache.py", "-k", f"test_on_a_gpu and {family} and {copies}"
        )
        for family in FAMILIES
        for copies in ("kernel", "direct")
    },
    **{
        f"pair-{family}": _tests(
            "-m", "gpu", "tests/engine/test_disaggregation.py", "-k", f"on_a_gpu and {family}", engines=3
        )
        for family in FAMILIES
    },
    "drafts": _tests("-m", "gpu", _FEATURES, "-k", "nodes64 or standalone or eagle3 or dflash", engines=ALL_AT_ONCE),
    "narrow": _tests("-m", "gpu", _FEATURES, "-k", "narrow", engines=ALL_AT_ONCE),
    "sampled": _tests("-m", "gpu", _FEATURES, "-k", "sampled", engines=ALL_AT_ONCE),
    "compile": _tests("-m", "gpu", _FEATURES, "-k", "compile", engines=ALL_AT_ONCE),
    "kits-gdn": _tests("tests/test_few_shot_gsm8k.py", "-k", "gdn-chain"),
    "kits-mamba2": _tests("--slow", "tests/test_few_shot_gsm8k.py", "-k", "mamba2-tree-rewind"),
    **{
        f"drift-{family}": _tests(
            "--slow", "-m", "gpu", "tests/kernels/test_stock_drift.py", "-k", f"drift_is_no_larger and {family}"
        )
        for family in FAMILIES
    },
    "metrics": _tests("tests/metrics/test_server.py"),
    "readme": _tests("-m", "gpu", "tests/docs/test_launch_line.py", engines=1),
    "wide": _tests("-m", "gpu", "tests/engine/test_wide_heads.py"),
    "parts": _tests("-m", "gpu", "tests/backends", "tests/state", "tests/hooks", engines=1),
    "quick": _tests("-m", "gpu", _ENGINE, "-k", "not two_ranks", engines=ALL_AT_ONCE),
    "adaptive": _tests("-m", "gpu", _ENGINE, "-k", "adaptive or lazy", engines=ALL_AT_ONCE),
    "int8": _tests("-m", "gpu", "tests/engine/test_int8_checkpoints.py", engines=4),
    "reload": _tests("-m", "gpu", "tests/engine/test_reload.py"),
    "flashinfer": _tests("-m", "gpu", _ENGINE, "-k", "flashinfer", engines=ALL_AT_ONCE),
    "wide-states": _tests("-m", "gpu", _ENGINE, "-k", "test_wide", engines=ALL_AT_ONCE),
    **{f"warm_up-{family}": _tests("-m", "gpu", "tests/engine/test_warm_up.py", "-k", family) for family in FAMILIES},
    "faults": _tests("tests/faults", "-k", "scheduler"),
    # In two, since all engines of one come before the first of its tests.
    **{
        f"slow-{family}-{part}": _tests(
            "-m", "gpu and slow", _ENGINE, "-k", f"float32 and {family} and {modes}", engines=ALL_AT_ONCE
        )
        for family in FAMILIES
        for part, modes in (("replay", "replay"), ("others", "not replay"))
    },
    "sanitize": Job(
        (
            *(sys.executable, "tests/bench/sanitize.py", "--quick", "--together", "--limit", "330", "--workers", "16"),
            *("--out", "{out}/sanitize"),
        ),
        alone=True,
    ),
}


def gpus_here() -> list[str]:
    """The names of GPUs in CUDA_VISIBLE_DEVICES, or the numbers of those that ``nvidia-smi`` lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [each.strip() for each in named.split(",") if each.strip()]
    try:
        told = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(gpu) for gpu in range(sum(line.startswith("GPU ") for line in told.splitlines()))]


@dataclass
class Running:
    """A started job, where, and since when."""

    name: str
    job: Job
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    began: float


def places(job: Job, running: Sequence[Running], gpus: int) -> tuple[int, ...] | None:
    """GPUs on which ``job`` may start now, those with the least to do; None if it has to wait."""
    busy: collections.Counter[int] = collections.Counter()
    for each in running:
        busy.update(dict.fromkeys(each.gpus, TOGETHER if each.job.alone else each.job.engines))
    room = 0 if job.alone else max(0, TOGETHER - job.engines)
    free = sorted((gpu for gpu in range(gpus) if busy[gpu] <= room), key=lambda gpu: busy[gpu])
    return tuple(sorted(free[: job.gpus])) if len(free) >= job.gpus else None


def summary(log: Path) -> Iterator[str]:
    """What of a log is worth a line: pytest's failures and its last line."""
    lines = log.read_text(errors="replace").splitlines()
    yield from (line[:160] for line in lines if re.match(r"(FAILED|ERROR) ", line))
    ends = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    yield from ends[-1:] or lines[-1:]


def _begin() -> None:
    """Runs in a job's process before its command: it ends with this one, and can be interrupted, which what a shell
    starts in the background cannot."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def prepared() -> Iterator[dict[str, str]]:
    """The environment of jobs: with the plugin of this checkout, its entry point, and a ``sglang`` command."""
    with tempfile.TemporaryDirectory() as folder:
        site, commands = Path(folder, "site"), Path(folder, "bin")
        plugin_site.make(site)
        commands.mkdir()
        command = commands / "sglang"
        command.write_text(f"#!{sys.executable}\n{COMMAND}")
        command.chmod(0o755)
        packages = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        yield with_byte_code() | {
            "PYTHONPATH": os.pathsep.join(packages),
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), str(commands)]),
        }


class Runner:
    """Runs jobs on the named GPUs; ``told`` is the summary file."""

    def __init__(self, jobs: Mapping[str, Job], gpus: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
        self.waiting, self.gpus, self.out = dict(jobs), gpus, out
        self.running: list[Running] = []
        self.told, self.failed = out / "summary.txt", False
        self._environment = dict(environment)

    def run(self, until: float) -> bool:
        """Whether all ended well by ``until``, of `time.time`."""
        # tests/engine/harness.py begins no engine after this
        self._environment["GPU_TESTS_UNTIL"] = str(until)
        while self.waiting or self.running:
            self._reap()
            self._start()
            if time.time() > until:
                self._end()
                break
            time.sleep(0.2)
        return not self.failed

    def _start(self) -> None:
        for name, job in list(self.waiting.items()):
            if job.gpus > len(self.gpus):
                self.failed = True
                self._tell(name, f"not run: it needs {job.gpus} GPUs, here are {len(self.gpus)}")
                del self.waiting[name]
                continue
            where = places(job, self.running, len(self.gpus))
            if where is None:
                continue
            del self.waiting[name]
            environment = self._environment | {
                "CUDA_VISIBLE_DEVICES": self._named(where),
                "TEST_GSM8K_RECORD": str(self.out / f"{name}.jsonl"),
            }
            command = [word.replace("{out}", str(self.out)) for word in job.command]
            with (self.out / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                    preexec_fn=_begin,
                )
            self.running.append(Running(name, job, where, process, time.monotonic()))

    def _reap(self) -> None:
        for each in [each for each in self.running if each.process.poll() is not None]:
            self.running.remove(each)
            status = each.process.returncode
            self.failed |= status != 0
            took = f"{time.monotonic() - each.began:.0f} s on GPU {self._named(each.gpus)}"
            self._tell(each.name, f"status {status}, {took}", *summary(self.out / f"{each.name}.log"))

    def _end(self) -> None:
        """The time is up. An interrupted pytest tells what it found so far."""
        self.failed |= bool(self.running or self.waiting)
        for each in self.running:
            each.process.send_signal(signal.SIGINT)
        ends = time.monotonic() + LAST_WORDS
        for each in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, ends - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
            self._tell(each.name, "cut off by the time limit", *summary(self.out / f"{each.name}.log"))
        for name in self.waiting:
            self._tell(name, "not begun: the time was up")
        self.running, self.waiting = [], {}

    def _named(self, where: Sequence[int]) -> str:
        return ",".join(self.gpus[gpu] for gpu in where)

    def _tell(self, name: str, *lines: str) -> None:
        text = "".join(f"{head:<16} {line}\n" for head, line in zip((name, *[""] * len(lines)), lines, strict=False))
        print(text, end="", flush=True)
        with self.told.open("a") as file:
            file.write(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="of --list, in the order to begin; all by default")
    parser.add_argument("--list", action="store_true", help="print the jobs")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="in all (default 3600)")
    parser.add_argument("--out", type=Path, help="folder for the logs")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="and a .tar.gz to put that folder into in the end")
    options = parser.parse_args(argv)
    if options.list:
        for name, job in JOBS.items():
            print(f"{name:<18} {job.gpus} GPU(s){' alone' if job.alone else ''}: {' '.join(job.command[1:])}")
        return 0
    if unknown := set(options.jobs) - set(JOBS):
        parser.error(f"{', '.join(sorted(unknown))}: no such job; --list says which there are")
    if options.out is None:
        parser.error("--out: the folder for the logs is missing")
    until = time.time() + options.limit - ENDING
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: JOBS[name] for name in options.jobs or JOBS}
    with prepared() as environment:
        found = subprocess.run([sys.executable, "-c", FIND], env=environment, capture_output=True, text=True)
        if found.returncode:
            parser.error(f"the plugin cannot be found: {found.stderr.strip()}")
        well = Runner(chosen, gpus_here(), options.out.resolve(), environment).run(until)
    if options.pack is not None:
        with tarfile.open(options.pack, "w:gz") as archive:
            archive.add(options.out, options.out.name)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
