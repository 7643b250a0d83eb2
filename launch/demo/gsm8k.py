"""Run sglang.test.few_shot_gsm8k on the tiny models' data, against a server of its own or a running one."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mtp_demo import interrupt
from mtp_demo.interrupt import Interrupted
from mtp_demo.options import DATA, ROOT
from mtp_demo.progress import Progress
from mtp_demo.server import HOST, Server, ServerError, die_with_parent, require_health

SHOTS = 5


def main() -> int:
    """Returns the benchmark's exit status. launch/eval_gsm8k.sh has checked the flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--port", type=int, help="a server that runs already")
    parser.add_argument("serve", nargs=argparse.REMAINDER, help="flags of launch/serve_tiny.sh")
    args = parser.parse_args()
    serve = args.serve[1:] if args.serve[:1] == ["--"] else args.serve
    if args.port is not None:
        require_health(args.port, f"start one with: bash launch/serve_tiny.sh --port {args.port}")
    interrupt.catch()
    with tempfile.TemporaryDirectory(prefix="gsm8k-") as folder, _port(args.port, serve, Path(folder)) as port:
        questions = Path(folder) / "questions.jsonl"
        questions.write_text(_head("train.jsonl", SHOTS) + _head("test.jsonl", args.questions), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "sglang.test.few_shot_gsm8k", "--data-path", str(questions)]
        command += ["--num-questions", str(args.questions + SHOTS), "--num-shots", str(SHOTS)]
        command += ["--max-new-tokens", "160", "--parallel", str(args.parallel), "--host", HOST]
        # The benchmark leaves its transcript in the working directory. In a session of its own a Ctrl-C does not reach
        # it: it is ended from here, without a traceback.
        return subprocess.run(
            [*command, "--port", str(port)],
            cwd=folder,
            env=_environment(),
            start_new_session=True,
            preexec_fn=die_with_parent,
        ).returncode


def _head(name: str, count: int) -> str:
    with (DATA / name).open(encoding="utf-8") as lines:
        return "".join(line for _, line in zip(range(count), lines, strict=False))


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": HOST, "no_proxy": HOST}


@contextlib.contextmanager
def _port(given: int | None, serve: list[str], folder: Path) -> Iterator[int]:
    if given is not None:
        yield given
        return
    progress = Progress()
    server = Server(["bash", str(ROOT / "launch" / "serve_tiny.sh"), *serve], device="", log=folder / "server.log")
    try:
        with progress.waiting("starting the server") as show:
            server.start(on_wait=show)
        progress.say(f"server up in {server.start_seconds:.0f} s")
        yield server.port
    finally:
        server.stop()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    except Interrupted as signal:
        print(f"{signal}; no server of this script is left running", file=sys.stderr)
        sys.exit(signal.status)
    except KeyboardInterrupt:
        sys.exit(130)
