"""What the plugin costs where nothing speculates: SGLang's one-batch benchmark in mode off and with replay loaded.

    python launch/bench/one_batch.py --shape nemotron-nano-9b-v2 --out r.json
    python launch/bench/one_batch.py --shape qwen3-next-80b --out r.json -- --tp-size 2 --attention-backend triton
    python launch/bench/one_batch.py --model-path launch/models/tiny-gdn --batches 2 -- --device cpu --dtype float32

What follows ``--`` goes to the benchmark, for both modes. The modes take turns (off, replay, replay, off, ...), a
process each, and in a process every batch is measured ``--repeats`` times. Medians of all of a mode are compared.
Processes that are in the JSON already are not run again. The interpreter must have SGLang and the plugin.

Ends with 0 if replay takes at most 1 % more (``--within``), 1 if it takes more, 2 for wrong flags, 3 if the benchmark
fails, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "launch" / "demo"))

from mtp_bench import shapes  # noqa: E402 - the path first
from mtp_bench.options import SHAPES, default_device, shape_names  # noqa: E402
from mtp_bench.record import write_whole  # noqa: E402
from mtp_demo import machine  # noqa: E402
from mtp_demo.server import with_byte_code  # noqa: E402

MODES = ("off", "replay")
#: What is compared, in seconds.
TIMES = ("prefill_latency", "median_decode_latency")


class Failed(Exception):
    """The benchmark ended without figures."""


def positive(text: str) -> int:
    """An integer above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def shape(text: str) -> Path:
    """A folder of launch/shapes."""
    if text not in shape_names():
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(shape_names())}")
    return SHAPES / text


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; those after ``--`` as they are."""
    ours, rest = list(argv), []
    if "--" in ours:
        first = ours.index("--")
        ours, rest = ours[:first], ours[first + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-path", help="a model with weights")
    model.add_argument("--shape", type=shape, help="a real model's sizes, from launch/shapes, with random weights")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 16, 64], metavar="N")
    parser.add_argument("--input-len", type=positive, default=512, metavar="N")
    parser.add_argument(
        "--output-len", type=positive, default=64, metavar="N", help="3 or more: the median is of steps"
    )
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="of each batch in a process")
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="processes a mode")
    parser.add_argument("--within", type=float, default=0.01, help="the largest share that replay may take more")
    parser.add_argument("--out", type=Path, help="the JSON; what is in it already is not measured again")
    options = parser.parse_args(ours)
    options.rest = rest
    if options.output_len < 3:
        parser.error("--output-len: the benchmark takes its median from 3 tokens on")
    return options


def turns(rounds: int) -> list[tuple[str, int]]:
    """(mode, round): off and replay, then the other way round, so that neither is always first."""
    return [(mode, number) for number in range(rounds) for mode in (MODES if number % 2 == 0 else MODES[::-1])]


def command(options: argparse.Namespace, mode: str, results: Path) -> list[str]:
    """One process of the benchmark, which appends a line of JSON for each measurement to ``results``."""
    if options.shape is None:
        model = ["--model-path", options.model_path]
    else:
        folder = shapes.make(options.shape, ROOT / ".cache" / "shapes" / options.shape.name)
        model = ["--model-path", str(folder), *shapes.flags(folder)]
    batches = [str(batch) for batch in options.batches for _ in range(options.repeats)]
    lengths = ["--input-len", str(options.input_len), "--output-len", str(options.output_len)]
    said = ["--mamba-mtp-mode", mode, "--result-filename", str(results)]
    return [
        *(sys.executable, "-m", "sglang_mamba_mtp.bench_one_batch", *model),
        *("--batch-size", *batches, *lengths, *options.rest, *said),
    ]


def measure(options: argparse.Namespace, mode: str) -> list[dict[str, float]]:
    """Run one process; the times of every measurement in it.

    Raises
        Failed: it ended without figures. What it printed last is in the message.
    """
    environment = {name: text for name, text in with_byte_code().items() if not name.startswith("SGLANG_MAMBA_MTP")}
    with tempfile.TemporaryDirectory(prefix="one-batch-") as folder:
        results, log = Path(folder, "results.jsonl"), Path(folder, "log")
        with log.open("w") as output:
            ended = subprocess.run(command(options, mode, results), stdout=output, stderr=output, env=environment)
        lines = results.read_text().splitlines() if results.is_file() else []
        if ended.returncode != 0 or len(lines) != len(options.batches) * options.repeats:
            said = log.read_text(errors="replace").splitlines()[-30:]
            raise Failed("\n".join((*said, f"mode {mode}: the benchmark ended with status {ended.returncode}")))
    figures = [json.loads(line) for line in lines]
    return [{name: each[name] for name in ("batch_size", *TIMES)} for each in figures]


def compare(runs: list[dict[str, Any]], batches: Sequence[int]) -> list[dict[str, Any]]:
    """A row a batch and time: each mode's median and its processes' medians, in seconds, and replay's over off's."""
    rows = []
    for batch in dict.fromkeys(batches):
        for name in TIMES:
            processes = {
                mode: [
                    [each[name] for each in run["measured"] if each["batch_size"] == batch]
                    for run in runs
                    if run["mode"] == mode
                ]
                for mode in MODES
            }
            medians = {mode: statistics.median(itertools.chain(*times)) for mode, times in processes.items()}
            rows.append(
                {
                    "batch": batch,
                    "time": name,
                    **medians,
                    "processes": {mode: [statistics.median(each) for each in processes[mode]] for mode in MODES},
                    "ratio": medians["replay"] / medians["off"],
                }
            )
    return rows


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What must be equal for processes to be compared."""
    model = options.model_path if options.shape is None else options.shape.name
    told = {name: getattr(options, name) for name in ("batches", "input_len", "output_len", "repeats")}
    return {"model": model, **told, "flags": options.rest, "versions": machine.versions()}


def opened(options: argparse.Namespace) -> dict[str, Any]:
    """The record in ``--out``, or a new one."""
    fresh = {
        "command": ["python", "launch/bench/one_batch.py", *sys.argv[1:]],
        "commit": machine.commit(ROOT),
        "hardware": machine.hardware(default_device()),
        "settings": settings_of(options),
        "runs": [],
    }
    if options.out is None or not options.out.is_file():
        return fresh
    found = json.loads(options.out.read_text(encoding="utf-8"))
    if found.get("settings") != fresh["settings"] or found.get("commit") != fresh["commit"]:
        raise SystemExit(f"--out: {options.out} was measured with other settings or at another commit; name another")
    return found


def keep(record: dict[str, Any], path: Path | None) -> None:
    """Write ``record``, whole or not at all, where there is somewhere to."""
    if path is not None:
        write_whole(path, record)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    record = opened(options)
    there = {(run["mode"], run["round"]) for run in record["runs"]}
    for mode, number in turns(options.rounds):
        if (mode, number) in there:
            continue
        print(f"round {number + 1} of {options.rounds}, {mode} ...", end=" ", flush=True)
        began = time.monotonic()
        measured = measure(options, mode)
        seconds = round(time.monotonic() - began, 1)
        print(f"{seconds:.0f} s", flush=True)
        record["runs"].append({"mode": mode, "round": number, "seconds": seconds, "measured": measured})
        keep(record, options.out)
    record["rows"] = compare(record["runs"], options.batches)
    record["within"] = options.within
    keep(record, options.out)
    print(f"{'batch':>5}  {'time':<22} {'off':>10} {'replay':>10}  replay / off")
    for row in record["rows"]:
        times = " ".join(f"{1e3 * row[mode]:7.3f} ms" for mode in MODES)
        print(f"{row['batch']:>5}  {row['time']:<22} {times}  {row['ratio']:.4f}")
    slower = [row for row in record["rows"] if row["ratio"] > 1 + options.within]
    print(f"replay takes {'more than' if slower else 'at most'} {options.within:.1%} more than off")
    return 1 if slower else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as failure:
        print(failure, file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        print("stopped; what was measured is kept in --out", file=sys.stderr)
        sys.exit(130)
