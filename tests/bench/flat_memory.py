"""Waves of the stress tests against one engine on the CPU for half an hour: memory, and what is free, on the way.

    python tests/bench/flat_memory.py [--minutes 30] [--model FOLDER | --family gdn|mamba2] --out FILE

The engine, its feeder and recorder, waves and specs are the tests' own. A line every 10 s (resident memory of the
scheduler's process, what is free just then); a line whenever the radix cache has been flushed (bytes of tensors, and
what is free: must be all that was free before the first request); and one whenever a wave is asked again and answers
otherwise than the first time.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "launch" / "demo")]

import psutil  # noqa: E402 - the path first

from tests.engine import harness  # noqa: E402

harness.prepare_environment("cpu")
harness.import_sglang()

from tests.engine import child, matrix, models, stress  # noqa: E402 - SGLang first
from tests.engine.feeder import Feeder  # noqa: E402

SEEDS, COUNT = (2, 3, 4), 400
"""Of the waves, and requests of each seed's."""

SAMPLE_EVERY = 10.0


class Endless(Feeder):
    """Feeds wave after wave until the time is up."""

    def __init__(self, side, scheduler, scenarios, *rest):
        self.side, self.cycle, self.sampled, self.waves, self.requests = side, 0, 0.0, 0, 0
        self.first, self.compared, self.differ, self.retractions, self.aborted = {}, 0, 0, 0, 0
        self.pool = list(scenarios)
        super().__init__(scheduler, [], *rest)
        self.free_at_start = child.free_counts(scheduler)
        self.process = psutil.Process()
        self.tell(f"free before any request: {self.free_at_start}")

    def tell(self, text):
        seconds = time.time() - self.side.began
        with open(self.side.out, "a") as file:
            file.write(f"{seconds:7.1f} s  {text}\n")

    def recv_requests(self, local_reqs=()):
        if time.time() - self.sampled >= SAMPLE_EVERY:
            self.sampled = time.time()
            free, queue = child.free_counts(self.scheduler), len(self.scheduler.waiting_queue)
            self.tell(
                f"rss {self.process.memory_info().rss / 2**20:.1f} MiB; free {', '.join(map(str, free.values()))} "
                f"({', '.join(free)}); running {self.scheduler.running_batch.batch_size()}, waiting {queue}; "
                f"{self.waves} waves, {self.requests} requests, forward {self.scheduler.forward_ct}"
            )
        return super().recv_requests(local_reqs)

    def _next_scenario(self):
        if not self.todo and time.time() < self.side.until:
            self.cycle += 1
            self.todo = [
                dataclasses.replace(wave, name=f"c{self.cycle}-{wave.name}", flush=wave.flush or n == 0)
                for n, wave in enumerate(self.pool)
            ]
        known = len(self.memory.in_use)
        began = super()._next_scenario()
        if len(self.memory.in_use) > known:  # flushed
            free, tensors = child.free_counts(self.scheduler), self.memory.in_use[-1][0]
            same = "as before any request" if free == self.free_at_start else f"NOT {self.free_at_start}"
            rss = self.process.memory_info().rss / 2**20
            self.tell(f"flushed: free {free}, {same}; tensors {tensors} bytes; rss {rss:.1f} MiB")
            if free != self.free_at_start:
                raise AssertionError(f"free {free}, {same}")
        return began

    def _finish_scenario(self):
        super()._finish_scenario()
        got = {key.partition("-")[2]: outcome for key, outcome in self.outcomes.items()}
        self.waves, self.requests = self.waves + 1, self.requests + len(got)
        self.retractions += sum(outcome.retractions for outcome in got.values())
        self.aborted += sum(outcome.aborted for outcome in got.values())
        for name in dict.fromkeys(key.partition("/")[0] for key in got):
            part = {key: outcome for key, outcome in got.items() if key.startswith(f"{name}/")}
            if name in self.first:
                off = harness.token_differences(
                    SimpleNamespace(outcomes=part), SimpleNamespace(outcomes=self.first[name])
                )
                self.compared, self.differ = self.compared + len(part), self.differ + len(off)
                if off:
                    self.tell(f"{name} answers otherwise than the first time: {off[:3]}")
            else:
                self.first[name] = part
        # what the tests keep for their comparisons would grow for ever
        self.outcomes.clear()
        self._abort_notices.clear()
        self.side.watching.records.clear()
        self.side.watching.gaps.clear()


class Side(child.Alone):
    """A process of one rank whose feeder does not end before the time is up."""

    def __init__(self, out, minutes):
        self.out, self.began = out, time.time()
        self.until = self.began + 60 * minutes
        self.watching, self.fed = None, None

    def feeder(self, *args):
        self.fed = Endless(self, *args)
        return self.fed

    def recorder(self, scheduler, *, live):
        self.watching = super().recorder(scheduler, live=live)
        return self.watching

    def run(self, loop):
        loop()
        fed = self.fed
        fed.tell(
            f"done: {fed.waves} waves, {fed.requests} requests, {fed.retractions} retractions, {fed.aborted} aborts, "
            f"{len(fed.paused)} pauses; {fed.compared} answers compared with the same waves' first, {fed.differ} differ"
        )


def waves(vocab):
    """Of several seeds, with names of their own."""
    for seed in SEEDS:
        for wave in stress.waves(seed, COUNT, vocab):
            yield dataclasses.replace(wave, name=f"s{seed}{wave.name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--family", default="gdn", choices=["gdn", "mamba2"])
    parser.add_argument("--model", help="folder; by default a random one of the tests'")
    parser.add_argument("--out", required=True, help="file to write lines to, as they come")
    options = parser.parse_args()
    Path(options.out).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(models.WRITERS[options.family](Path(folder, options.family)))
        case = matrix.Case(options.family, "nextn-tree", "rewind", "replay")
        limits = {"timeout": 60 * options.minutes + 600, "max_steps": 10**9}
        spec = case.spec(model, **matrix.FEW_SLOTS["rewind"], record_live=False, **limits)
        todo = list(waves(models.VOCAB - 1))
        side, part = Side(options.out, options.minutes), Path(folder, "rank0")
        context = multiprocessing.get_context("fork")
        process = context.Process(
            target=child.child_main, args=(spec, todo, f"{part}.result", f"{part}.log", 0, side), daemon=True
        )
        process.start()
        process.join(spec.timeout)
        end = f"exit code {process.exitcode}"
        result = harness.read_result(spec, part, end)
        with open(options.out, "a") as file:
            if isinstance(result, str):
                file.write(f"FAILED {result}\n")
            else:
                file.write(
                    f"ended well: {spec.label}, pool {result.pool}, {result.forwards} forwards in "
                    f"{result.seconds_to_run:.0f} s; all is free that was before (check_nothing_is_lost)\n"
                )
                file.write("\n".join(line for line in result.log.splitlines() if "mamba-mtp" in line) + "\n")


if __name__ == "__main__":
    main()
