"""From flags to exit status: what a call does around the loop, and how it ends."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence

from . import plot, report
from .options import Options, parse
from .progress import Progress
from .record import Record, RecordError

COMPLETE, FAILED, WRONG_FLAGS, OUT_OF_TIME, INTERRUPTED = 0, 1, 2, 75, 130  # 75: EX_TEMPFAIL
PLUGIN = {"group": "sglang.srt.plugins", "name": "mamba_mtp"}


def main(argv: Sequence[str]) -> int:
    """Measure what the record lacks; returns the exit status."""
    options = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)  # unwinds, so that the server is stopped
    if not importlib.metadata.entry_points(**PLUGIN):
        print("sglang_mamba_mtp is not installed for this interpreter: bash launch/bench_serving.sh --python PATH "
              "takes it from the checkout", file=sys.stderr)  # fmt: skip
        return FAILED
    try:
        record = Record(options)
    except RecordError as error:
        print(error, file=sys.stderr)
        return WRONG_FLAGS
    progress = Progress()
    try:
        return _measure(options, record, progress)
    finally:
        _tell(options, record, progress)


def _measure(options: Options, record: Record, progress: Progress) -> int:
    """Run the loop; whatever ends it, the record says so."""
    progress.say(f"{options.name}: importing SGLang {record.content['versions']['sglang']}")
    try:
        _prepare()
        from .run import Benchmark, OutOfTime

        try:
            Benchmark(options, record, progress)()
        except OutOfTime as late:
            progress.say(f"stopping here: {late}; the same call again goes on")
            record.end("time limit")
            return OUT_OF_TIME
    except (KeyboardInterrupt, SystemExit):
        record.end("interrupted")
        progress.say("interrupted: no server is left; the same call again goes on from here")
        raise
    except BaseException as error:
        record.fail(f"{type(error).__name__}: {error}")
        record.end("failed")
        raise
    record.end("failed" if record.content["errors"] else "complete")
    return FAILED if record.content["errors"] else COMPLETE


def _prepare() -> None:
    """Make SGLang importable, and let nothing of ours into the servers that was not said by flags."""
    # sglang.test switches this on for whoever imports it, servers included; users' servers run without.
    os.environ.setdefault("SGLANG_STRICT_CONFIG_MUTATION", "0")
    for name in [name for name in os.environ if name.startswith(("SGLANG_MAMBA_MTP_", "SGLANG_SIMULATE_"))]:
        del os.environ[name]
    from sglang_mamba_mtp import cpu

    cpu.install()  # without a GPU, SGLang does not import by itself


def _tell(options: Options, record: Record, progress: Progress) -> None:
    """Table, plots, and where everything is."""
    tables = report.tables(record.content)
    if tables:
        print("\n".join(["", plot.conditions(record.content), *tables]), flush=True)
    if record.content["loads"] and options.plots:
        try:
            for png in plot.draw(record.path):
                progress.say(f"plot: {png}")
        except ImportError:
            progress.say("no plots: matplotlib is not installed")
    for error in record.content["errors"]:
        print(f"FAILED: {error}", file=sys.stderr)
    progress.say(f"record: {record.path} ({record.content['ended']}); logs: {options.logs}")


def _exit_on_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
