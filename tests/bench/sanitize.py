"""compute-sanitizer's tools over the kernel tests, in many processes at once, on all GPUs that it may see.

    python tests/bench/sanitize.py                                  # every kernel test, 8 minutes a tool at most
    python tests/bench/sanitize.py --quick --limit 90               # real sizes of every kernel, about 6 minutes in all
    python tests/bench/sanitize.py --quick --together --limit 300   # the same in less: 16 cores, initcheck may not end
    python tests/bench/sanitize.py --tools racecheck -k mamba2 --out FOLDER

Tools run one after the other, or together, with as many processes in all. Before the first, tests of a quick run are
run without one, which compiles what they need; those that take long go first. Left out: the references' parameters,
tests that break the code on purpose, chains of hundreds of commits, and what asks nothing of a GPU. Where the time of a
tool is over its processes are ended, and what had not been reached is named.

Prints a line for each kind of finding (in a kernel of ours, or elsewhere), a tool's line when it is done and a table at
the end; FOLDER gets every log (without it a temporary one does, which stays where anything was found). The exit status
is 1 where anything was found or a test failed, 2 where nothing was but not all was reached. "broken": processes that
were not checked to their end, though nobody ended them. initcheck counts reads of device memory that nothing has
written since it was allocated, PyTorch's own among them: a copy of a `torch.empty` is one, a kernel's masked load is
none. With the caching allocator on (tests that capture CUDA graphs) it sees a block as written once anybody has written
there.
"""

from __future__ import annotations

import argparse
import collections
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import sanitizer
from on_gpus import gpus_here

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "launch" / "demo"))

from mtp_demo.server import die_with_parent, with_byte_code  # noqa: E402 - the path first

LEFT_OUT = re.compile(
    r"reference|mutation|sabotage|wrong|noticed|_seen|on_purpose|drift|4096|thousand|errors_name|ops_for"
    r"|/test_(arguments|operands|grids?|bench_modes|counted|longest_window|stock_drift|sabotage)\.py"
)
GRAPHS = re.compile(r"::test_\w*graph")
LONG = re.compile(
    r"slots_real_sizes|settle_has|real_sizes(\[16|_around)|than_a_tile_of_tokens_at|model_shapes\[state_dtype1|axis_orders"
)
QUICK = (
    r"gdn/test_gpu.py::test_real_sizes\[((4|8)-chain-torch.float32|4-tree-torch.bfloat16|16-tree-torch.float32)\]",
    r"gdn/test_gpu.py::test_real_sizes_around_half_a_tile\[torch.float32-2048",
    r"gdn/test_fold_product.py::test_settle_has_a_verifys_bits_at_model_heads",
    r"gdn/test_gpu.py::test_slots_real_sizes\[(chain-torch.float32|tree-torch.bfloat16)\]",
    r"gdn/test_gpu.py::test_graph_replay_equals_eager",
    r"mamba2/test_verify_replay.py::test_model_shapes\[(state_dtype0-128-80-8-128-4-(6|24)|state_dtype1-128-80-8-128-16-6)\]",
    r"mamba2/test_verify_replay.py::test_more_than_a_tile_of_tokens_at_model_heads\[state_dtype0-128",
    r"mamba2/test_fold_product.py::test_settle_has_a_verifys_bits_at_model_heads\[state_dtype[01]-\(128",
    r"mamba2/test_verify_slots.py::test_axis_orders_change_nothing\[64-16-state_dtype[01]-tree-own slot-kernel\]",
    r"mamba2/test_verify_slots.py::test_graph_replay_equals_eager",
    r"conv1d/test_verify_replay.py::test_(many_programs_path|matches_oracle\[8-(chain|tree)-kernel\])",
    r"conv1d/test_parts.py::test_each_channel_lands_in_its_part\[kernel, shared.*-more than a block\]",
    r"conv1d/test_fold.py::test_(many_channels\[300|in_words_of_four_channels\[torch.int32-600-torch.bfloat16\])",
    r"conv1d/test_verify_slots.py::test_(dtypes\[state_dtype0-dtype[01]-kernel\]|graph_replay)",
    r"common/test_tree.py::test_tree_from_links\[8-dtype[01]-kernel\]",
    r"common/test_window.py::test_matches_the_rule\[(takes all|leaves the newest)-8-5-kernel\]",
    r"common/test_plan.py::test_rows_that_fold_go_first\[300-dtype0-kernel\]",
    r"common/test_draft_slots.py::test_(place_nodes\[3|commit_slots\[True|newest_and_forget\[)-?dtype0-kernel\]",
    r"common/test_(move|turn).py::test_real_sizes\[(\(32, 128, 128\)|128-128)-dtype0\]",
)
"""Tests of a quick run: each kernel at the sizes of a model, or where it has none at a batch's."""

OUTCOME = re.compile(r"(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


class Done(NamedTuple):
    """What became of a chunk's process: outcomes counted, which of its tests had none, its log, and whether it was
    ended from outside."""

    outcomes: collections.Counter[str]
    missed: list[str]
    log: sanitizer.Log
    ended: bool


def wanted(ids: Sequence[str], *, quick: bool, keyword: str | None = None) -> list[str]:
    """Node ids to run, of those that `keyword` left. Raises ValueError where a pattern of a quick run finds none, or
    with a keyword all of them do."""
    ids = [test for test in ids if not LEFT_OUT.search(test)]
    if not quick:
        return ids
    found = {pattern: [test for test in ids if re.search(pattern, test)] for pattern in QUICK}
    missing = [pattern for pattern, tests in found.items() if not tests]
    if missing and not (keyword and len(missing) < len(QUICK)):
        raise ValueError(f"no test of -k {keyword} is in a quick run" if keyword else f"no test is {missing[0]}")
    return [test for test in ids if any(test in tests for tests in found.values())]


def split(ids: Sequence[str], size: int) -> list[list[str]]:
    """Chunks of up to `size` neighbours; those that capture graphs lie in chunks of their own."""
    chunks = []
    for graphs in (False, True):
        kind = [test for test in ids if bool(GRAPHS.search(test)) == graphs]
        chunks += [kind[at : at + size] for at in range(0, len(kind), size)]
    return sorted(chunks, key=lambda chunk: not any(LONG.search(test) for test in chunk))


class Machine:
    """Where the tests run: environment, GPUs, how many processes at once."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        # of all tools that run together
        self.room = threading.Semaphore(workers)
        # tests import the kernels of this tree by their installed name
        packages = folder / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        if not (packages / "mamba_mtp_kernels").exists():
            (packages / "mamba_mtp_kernels").symlink_to(ROOT / "kernels")
        path = os.pathsep.join([str(ROOT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**with_byte_code(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.gpus = gpus_here()
        if not self.gpus:
            sys.exit("sanitize.py: no GPU: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES leaves none")
        self.excludes = self._excludes()

    def _excludes(self) -> bool:
        """Whether this compute-sanitizer takes the filter of kernels, seen by a tiny program."""
        log = self.folder / "filter.log"
        program = [sys.executable, "-c", "import torch; torch.ones(9, device='cuda').sum().item()"]
        command = sanitizer.command("memcheck", log, program)
        tried = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if log.exists() and sanitizer.read(log.read_text()).total is not None:
            return True
        print(f"kernels of others are looked at too: {(tried.stdout + tried.stderr)[-500:]}", flush=True)
        return False

    def pytest(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]

    def collect(self, keyword: str | None) -> list[str]:
        arguments = ["--collect-only", "-q", *(["-k", keyword] if keyword else []), "tests/kernels"]
        found = subprocess.run(
            self.pytest(*arguments), cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        ids = [line for line in found.stdout.splitlines() if line.startswith("tests/kernels/") and "::" in line]
        if not ids:
            sys.exit(f"sanitize.py: no tests were collected: {(found.stdout + found.stderr)[-2000:]}")
        return ids

    def run(self, tool: str | None, chunks: Sequence[list[str]], limit: float) -> list[Done]:
        """All chunks under a tool (None: without), until `limit` seconds are over."""
        for stale in self.folder.glob(f"{tool or 'compile'}-*"):
            stale.unlink()
        ends = time.monotonic() + limit
        waiting: queue.SimpleQueue[tuple[int, list[str]]] = queue.SimpleQueue()
        for numbered in enumerate(chunks):
            waiting.put(numbered)
        done: list[Done] = []

        def work(gpu: str) -> None:
            while True:
                try:
                    number, ids = waiting.get_nowait()
                except queue.Empty:
                    return
                with self.room:
                    done.append(self._run_one(tool, number, ids, gpu, ends))

        threads = [threading.Thread(target=work, args=(self.gpus[n % len(self.gpus)],)) for n in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return done

    def _run_one(self, tool: str | None, number: int, ids: list[str], gpu: str, ends: float) -> Done:
        name = f"{tool or 'compile'}-{number}"
        output = self.folder / f"{name}.txt"
        program = self.pytest("-v", *ids)
        environment = {**self.environment, "CUDA_VISIBLE_DEVICES": gpu}
        if tool:
            log = self.folder / f"{name}.%p.log"
            program = sanitizer.command(tool, log, program, exclude=self.excludes)
            environment |= sanitizer.environment(tool, graphs=bool(GRAPHS.search(ids[0])))
        ended = True
        if time.monotonic() < ends:
            with output.open("w") as file:
                process = subprocess.Popen(
                    program,
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
                try:
                    process.wait(max(0.0, ends - time.monotonic()))
                    ended = False
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = output.read_text() if output.exists() else ""
        lines = [line for line in said.splitlines() if line.startswith("tests/") and "::" in line]
        ran = {line[: found.start()].strip(): found[1] for line in lines if (found := OUTCOME.search(line))}
        outcomes, missed = collections.Counter(ran.values()), [test for test in ids if test not in ran]
        text = "\n".join(log.read_text(errors="replace") for log in self.folder.glob(f"{name}.*.log"))
        return Done(outcomes, missed, sanitizer.read(text), ended)


def report(tool: str, done: Sequence[Done], seconds: float, ours: set[str]) -> tuple[str, int]:
    """(the table's line, 0, 1 or 2 as the program exits); prints findings."""
    outcomes: collections.Counter[str] = sum((one.outcomes for one in done), collections.Counter())
    findings = collections.Counter(finding for one in done for finding in one.log.findings)
    for (what, kernel), count in findings.most_common():
        where = f"in {kernel}" if kernel in ours else f"elsewhere, {kernel or 'in no kernel'}"
        print(f"{tool}: {count} x {what}, {where}")
    in_ours = sum(count for finding, count in findings.items() if finding.kernel in ours)
    # a tool counts what it does not print, and of a process that was ended only what it printed is known
    total = sum(max(one.log.total or 0, len(one.log.findings)) for one in done)
    failed = outcomes["FAILED"] + outcomes["ERROR"]
    missed = [test for one in done for test in one.missed]
    for test in missed:
        print(f"{tool}: {test} had not ended")
    broken = sum(not one.ended and (one.log.total is None or bool(one.missed)) for one in done)
    counts = f"{outcomes['PASSED']:6d} {outcomes['SKIPPED']:7d} {failed:6d} {len(missed):7d} {broken:6d}"
    line = f"{tool:10s} {len(done):9d} {counts} {in_ours:7d} {total:8d} {seconds:6.0f}"
    return line, 1 if total or failed or broken else 2 if missed else 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=list(sanitizer.TOOLS), choices=sanitizer.TOOLS)
    parser.add_argument("--quick", action="store_true", help="one real-size test for each kernel")
    parser.add_argument("-k", dest="keyword", help="pytest's, of the tests to run")
    parser.add_argument("--together", action="store_true", help="all tools at once")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds a tool")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once, of all tools")
    parser.add_argument("--chunk", type=int, help="tests a process; 24, quick: 1")
    parser.add_argument("--out", type=Path, help="folder of the logs; a temporary one is removed")
    options = parser.parse_args(argv)

    folder = (options.out or Path(tempfile.mkdtemp())).resolve()
    machine = Machine(folder, options.workers)
    try:
        ids = wanted(machine.collect(options.keyword), quick=options.quick, keyword=options.keyword)
    except ValueError as error:
        sys.exit(f"sanitize.py: {error}")
    chunks = split(ids, options.chunk or (1 if options.quick else 24))
    print(
        f"{len(ids)} tests in {len(chunks)} processes, {options.workers} at once on {len(machine.gpus)} GPUs",
        flush=True,
    )
    if options.quick:
        started = time.monotonic()
        machine.run(None, chunks, options.limit)
        print(f"without a tool, compiling: {time.monotonic() - started:.0f} s", flush=True)
    ours = sanitizer.our_kernels(ROOT / "kernels")

    def under(tool: str) -> tuple[str, int]:
        started = time.monotonic()
        done = machine.run(tool, chunks, options.limit)
        line, status = report(tool, done, time.monotonic() - started, ours)
        print(line, flush=True)
        return line, status

    with ThreadPoolExecutor(len(options.tools) if options.together else 1) as pool:
        lines, statuses = zip(*pool.map(under, options.tools), strict=True)
    print("tool       processes passed skipped failed not run broken in ours findings seconds")
    print("\n".join(lines))
    shutil.rmtree(folder / "packages")
    if options.out or 1 in statuses:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder)
    sys.exit(1 if 1 in statuses else max(statuses))


if __name__ == "__main__":
    main()
