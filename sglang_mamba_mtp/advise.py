"""``python -m sglang_mamba_mtp.advise --model-path MODEL --gpu-memory 80 --tp 2``: what a server would have room for.

State bytes of a request, running requests and KV tokens for each way of serving and each strategy of the prefix cache;
the accept length from which on speculation pays; the line to launch. Needs config.json: no GPU, no weights. Sizes are
SGLang's own arithmetic (`compat.planning`) and this plugin's (`state.sizing`), so a server that is given the same
memory has the same slots and requests. Break-even is an estimate (`costs.step`).

What SGLang would measure is given instead: ``--gpu-memory`` a GPU, of which ``--mem-fraction-static`` is for weights
and pools (0.85, or as little as leaves room for graphs and the drafts' KV cache, by `costs.beside`), and ``--weights``
the model's files (looked up, or counted from the configuration). A CUDA context, NCCL's buffers and a draft model's own
weights take more; add them to ``--weights`` for figures to the slot.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict

from . import cpu, names
from .advice import GIB, MIB, STRATEGIES, Advice, advise
from .costs.beside import WORKSPACES
from .costs.step import DEFAULT_MACHINE, MACHINES, known_machine
from .errors import MtpError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m sglang_mamba_mtp.advise",
        description="What a server of a hybrid model would have room for, and when speculation pays. Needs no GPU.",
    )
    add = made.add_argument
    add("--model-path", required=True, help="a folder with config.json, or a name that SGLang can look up")
    add("--gpu-memory", type=_positive, required=True, metavar="GIB", help="memory of one GPU")
    add("--mem-fraction-static", type=_share, help="share of it for weights and pools (default: 0.85 or less)")
    add("--tp", type=_whole(1), default=1, help="tensor-parallel ranks (default 1)")
    add("--weights", type=_positive, metavar="GIB", help="size of the model's files; looked up or counted by default")
    add("--mode", choices=(names.REPLAY, names.SLOTS), help="only this mode of the plugin, beside SGLang's own ways")
    add("--algorithm", default="NEXTN", help="how drafts are made: NEXTN (default), NGRAM, EAGLE, DFLASH, ...")
    add("--draft-model-path", metavar="PATH", help="folder or name of the draft's model, where it has one of its own")
    add("--draft-nodes", type=_whole(2), default=4, help="draft nodes of a verify, the root included (default 4)")
    add("--draft-steps", type=_whole(1), help="forwards of a draft (default: its nodes less one, as a chain's)")
    add("--topk", type=_whole(1), default=1, help="branches a step; 1 (default) is a chain")
    add("--window", type=_whole(0), help="--mamba-mtp-window (default: by the draft's nodes)")
    add("--radix-strategy", choices=STRATEGIES, help="only this strategy; none is --disable-radix-cache")
    add("--enable-hierarchical-cache", action="store_true", help="as SGLang's: the prefix cache goes on in host memory")
    add("--state-dtype", choices=("float32", "bfloat16", "float16"), help="--mamba-ssm-dtype")
    add("--dtype", default="auto", help="--dtype (default auto)")
    add("--context-len", type=_whole(1), help="--context-length")
    add("--max-running-requests", type=_whole(1), help="requests asked for (default: as many as fit)")
    add("--request-tokens", type=_whole(1), default=2048, help="of a usual request, for break-even (default 2048)")
    add("--gpu", type=_gpu, default=DEFAULT_MACHINE, help="name of the GPU, for break-even (default H100)")
    add("--trust-remote-code", action="store_true", help="as SGLang's")
    add("--json", action="store_true", help="for programs")
    return made


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0 and below 1")
    return value


def _whole(least: int) -> Callable[[str], int]:
    """Reads a whole number of ``least`` or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number of {least} or more")
        return int(text)

    return read


def _gpu(text: str) -> str:
    """A name that `known_machine` knows."""
    if known_machine(text) is None:
        raise argparse.ArgumentTypeError(f"{text}: expected one of {', '.join(MACHINES)}, or a name with one in it")
    return text


def text(advice: Advice, options: argparse.Namespace) -> str:
    """For people."""
    lines = [
        f"{advice.model}: {advice.family}, {advice.slot_bytes / MIB:.1f} MiB of state a slot on each of {options.tp} "
        f"rank(s); {advice.weights:.1f} GiB of weights ({advice.weights_from}); {advice.memory:.1f} GiB a rank for "
        f"states and KV cache",
        "",
        f"{'prefix cache':<18}{'verify':<17}{'slots':>8}{'requests':>10}{'KV tokens':>12}{'state a request':>17}"
        f"{'break-even':>12}",
    ]
    for row in advice.rows:
        start = f"{row.strategy:<18}{row.way:<17}"
        if row.why:
            lines.append(f"{start}  {row.why}")
            continue
        even = "" if row.break_even is None else f"{max(1.0, row.break_even):.1f}"
        lines.append(
            f"{start}{row.slots:>8}{row.requests:>10}{row.tokens:>12,}{row.request_bytes / MIB:>13.1f} MiB{even:>12}"
        )
    lines += [
        "",
        f"break-even: accept length at which a full batch of requests of {options.request_tokens} tokens is as fast as "
        f"without speculation, on one {options.gpu}; an estimate",
        "",
        _beside(advice, options),
        "",
        "To serve the most requests:",
        f"  {advice.launch}",
    ]
    return "\n".join(lines)


def _beside(advice: Advice, options: argparse.Namespace) -> str:
    row, left = advice.launched, options.gpu_memory * (1 - advice.fraction)
    said = (
        f"beside weights and pools that server takes some {row.beside / GIB:.1f} GiB a rank (keys and values of "
        f"drafts {row.draft_bytes / GIB:.1f}, CUDA graphs {row.graph_bytes / GIB:.1f}, {WORKSPACES / GIB:.0f} for "
        f"workspaces) of {left:.1f} that --mem-fraction-static {advice.fraction:g} leaves"
    )
    if advice.enough(options.gpu_memory):
        return said
    if options.mem_fraction_static is None:
        return f"{said}: too little, and so is what any other share leaves; ask for fewer --draft-nodes"
    return f"{said}: too little, leave that flag away or lower it"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the advice; the exit status is 0, or 1 with a message."""
    options = parser().parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cpu.install()
    try:
        advice = advise(options)
    except MtpError as error:
        print(f"mamba-mtp: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(advice), indent=2) if options.json else text(advice, options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
