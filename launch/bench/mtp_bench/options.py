"""The benchmark's flags. Standard library only: they are checked before the environment is set up."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

if __package__ in (None, ""):  # run as a file, by launch/bench_serving.sh, before any package is there
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mtp_bench.drafts import ALGORITHMS, WITH_DRAFT_MODEL, Draft
from mtp_bench.drafts import parse as parse_draft
from mtp_bench.loads import Arrivals, Conversations, Load, Requests
from mtp_bench.modes import COMPARED, MODES, Mode, text_config

ROOT = Path(__file__).resolve().parents[3]
SHAPES = ROOT / "launch" / "shapes"
DRAFT_FOLDER = "draft"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Options:
    """What one call does; `parse` explains each field. accept: tokens a step, simulated, None as drafted."""

    model: str
    shape: Path | None
    config: dict[str, Any]
    draft_model: str | None
    algorithm: str
    modes: tuple[Mode, ...]
    drafts: tuple[Draft, ...]
    accept: float | None
    loads: tuple[Load, ...]
    input_len: int
    output_len: int
    device: str
    dtype: str | None
    tp: int
    mem_fraction: float | None
    max_total_tokens: int | None
    max_running: int
    server_args: tuple[str, ...]
    client_args: tuple[str, ...]
    seed: int
    out: Path
    logs: Path
    plots: bool
    fresh: bool
    start_timeout: float
    time_limit: float | None

    @property
    def name(self) -> str:
        """The model, for titles."""
        return self.shape.name if self.shape is not None else Path(self.model).name


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read and check the flags; exits with status 2 and a message where one is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    device = args.device or default_device()
    defaults = _defaults(device, args.quick)
    shape, model = _model(args, parser)
    config = _config(Path(model), parser)
    draft_model = args.draft_model_path
    if draft_model is None and shape is not None and (shape / DRAFT_FOLDER).is_dir():
        draft_model = str(shape / DRAFT_FOLDER)
    algorithm = args.algorithm or ("STANDALONE" if draft_model is not None else "NEXTN")
    loads = _loads(args, defaults)
    accept = args.accept
    if accept is None and shape is not None:
        accept = 3.0 if all(draft.chain for draft in args.draft) else 2.0
    out = (args.out or ROOT / ".cache" / "bench" / f"{Path(model).name}.json").absolute()
    options = Options(
        model=model,
        shape=shape,
        config=config,
        draft_model=draft_model if algorithm in WITH_DRAFT_MODEL else None,
        algorithm=algorithm,
        modes=args.modes,
        drafts=args.draft,
        accept=accept,
        loads=loads,
        input_len=args.input_len or defaults.input_len,
        output_len=args.output_len or defaults.output_len,
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else None),
        tp=args.tp,
        mem_fraction=args.mem_fraction_static,
        max_total_tokens=args.max_total_tokens,
        max_running=args.max_running_requests or max((load.room for load in loads), default=1),
        server_args=tuple(args.server_args),
        client_args=tuple(args.client_args),
        seed=args.seed,
        out=out,
        logs=(args.logs or out.with_suffix(".logs")).absolute(),
        plots=not args.no_plots,
        fresh=args.fresh,
        start_timeout=args.start_timeout,
        time_limit=args.time_limit,
    )
    _check(options, parser)
    return options


@dataclass(frozen=True)
class Defaults:
    """What a run takes where nothing is said. rounds: prompts for each of the requests at once."""

    loads: tuple[int, ...]
    rounds: int
    input_len: int
    output_len: int


def _defaults(device: str, quick: bool) -> Defaults:
    if device == "cpu":
        return Defaults((1, 4), 1, 32, 16) if quick else Defaults((1, 4, 8), 2, 64, 64)
    return Defaults((1, 16, 64), 1, 512, 128) if quick else Defaults((1, 16, 64, 256), 3, 512, 256)


def _loads(args: argparse.Namespace, defaults: Defaults) -> tuple[Load, ...]:
    """Every kind that was asked for, in this order; the default's, if none was."""
    others = args.request_rate or args.conversations
    concurrency = args.concurrency if args.concurrency is not None else (() if others else defaults.loads)
    rounds = args.rounds or defaults.rounds
    return (
        *(Requests(count, count * rounds) for count in concurrency),
        *(Arrivals(rate, max(1, math.ceil(rate * args.rate_seconds))) for rate in args.request_rate or ()),
        *(Conversations(count, args.turns, args.turn_len) for count in args.conversations or ()),
    )


def default_device() -> str:
    """cuda where the NVIDIA driver is loaded, else cpu."""
    return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _several(text: str) -> int:
    if _positive(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 2")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _above_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def _mode(text: str) -> Mode:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(MODES)}")
    return MODES[text]


def _draft(text: str) -> Draft:
    try:
        return parse_draft(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _list_of(item: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    """Reads a list with commas, each entry once."""

    def read(text: str) -> tuple[Item, ...]:
        return tuple(dict.fromkeys(item(part.strip()) for part in text.split(",") if part.strip()))

    return read


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bash launch/bench_serving.sh",
        usage="bash launch/bench_serving.sh (--shape NAME | --model-path PATH) [flags]",
        description="Serve one model in several ways, one server after the other at equal flags and equal memory, and "
        "measure each with SGLang's bench_serving. Finished loads are kept in the JSON and skipped by the next call. "
        "Exits 0 if all is measured, 1 if a server or a load failed, 2 for wrong flags, 75 if the time limit ended it, "
        "130 after Ctrl-C. Of the script itself: --version X (SGLang version), --python PATH (this interpreter, "
        "no set-up).",
    )
    add = parser.add_argument
    add("--shape", metavar="NAME", help=f"a real model's sizes, random weights: {', '.join(shape_names())}")
    add("--model-path", metavar="PATH", help="a checkpoint: a folder, or what SGLang can download")
    add("--modes", type=_list_of(_mode), default=tuple(MODES[name] for name in COMPARED), metavar="A,B",
        help=f"of {', '.join(MODES)}; default: {','.join(COMPARED)}")  # fmt: skip
    add("--draft", type=_list_of(_draft), default=(parse_draft("chain4"),), metavar="A,B",
        help="chainN, treeN or treeNxTOPK, several with commas; default: chain4")  # fmt: skip
    add("--algorithm", choices=ALGORITHMS, help="who drafts; default: NEXTN, or STANDALONE with a draft model")
    add("--draft-model-path", metavar="PATH", help="for STANDALONE and EAGLE; a shape may bring its own")
    add("--accept", type=_above_zero, help="simulate this many tokens a step; default: 3 (trees 2) with --shape, else "
        "as drafted")  # fmt: skip
    add("--concurrency", type=_list_of(_positive), metavar="A,B", help="requests at once; default: 1,16,64,256")
    add("--request-rate", type=_list_of(_above_zero), metavar="A,B", help="requests a second, as many loads more")
    add("--rate-seconds", type=_above_zero, default=30.0, help="length of such a load; default: %(default)s")
    add("--conversations", type=_list_of(_positive), metavar="A,B", help="conversations at once, as many loads more: "
        "each turn's prompt is the last one, its answer and new tokens")  # fmt: skip
    add("--turns", type=_several, default=2, help="turns of a conversation; default: %(default)s")
    add("--turn-len", type=_positive, default=32, help="new tokens of a later turn; default: %(default)s")
    add("--rounds", type=_positive, help="prompts for each of the requests at once; default: 3")
    add("--input-len", type=_positive, help="tokens of a prompt; default: 512")
    add("--output-len", type=_positive, help="tokens of an answer; default: 256")
    add("--tp", type=_positive, default=1, help="GPUs a server; default: %(default)s")
    add("--mem-fraction-static", type=_share, help="equal memory for every mode; default on a GPU: 0.85")
    add("--max-total-tokens", type=_positive, help="equal KV cache for every mode, instead of SGLang's sizing")
    add("--max-running-requests", type=_positive, help="default: the highest concurrency")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is an NVIDIA GPU, else cpu")
    add("--dtype", help="default: float32 on cpu, the model's own on cuda")
    add("--server-args", type=_words, default=[], metavar="'...'", help="more arguments of launch_server, for all")
    add("--client-args", type=_words, default=[], metavar="'...'", help="more arguments of bench_serving")
    add("--quick", action="store_true", help="minutes: fewer requests, shorter answers")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--out", type=Path, metavar="JSON", help="the record; default: .cache/bench/MODEL.json in the checkout")
    add("--logs", type=Path, metavar="FOLDER", help="servers' and clients' logs; default: beside the record")
    add("--no-plots", action="store_true", help="write no PNG beside the record")
    add("--fresh", action="store_true", help="start the record anew")
    add("--start-timeout", type=_above_zero, default=900.0, help="seconds a server may take; default: %(default)s")
    add("--time-limit", type=_above_zero, metavar="SECONDS", help="begin nothing that would not end by then")
    return parser


def shape_names() -> list[str]:
    """The folders of launch/shapes."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def _model(args: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Path | None, str]:
    if (args.shape is None) == (args.model_path is None):
        parser.error("give either --shape or --model-path")
    if args.shape is None:
        local = Path(args.model_path)
        if not local.exists() and (args.model_path[0] in "/.~" or args.model_path.count("/") != 1):
            parser.error(f"--model-path: there is no {args.model_path}; a model to download is named OWNER/MODEL")
        return None, str(local.resolve()) if local.exists() else args.model_path
    if args.shape not in shape_names():
        parser.error(f"--shape: {args.shape!r} is none of {', '.join(shape_names())}")
    return SHAPES / args.shape, str(SHAPES / args.shape)


def _config(folder: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The model's config.json; empty for one that is still to be downloaded."""
    if not folder.exists():
        return {}
    if not (folder / "config.json").is_file():
        parser.error(f"--model-path: {folder} has no config.json")
    return json.loads((folder / "config.json").read_text())


def _check(options: Options, parser: argparse.ArgumentParser) -> None:
    if not options.modes:
        parser.error("--modes: none given")
    if not options.loads:
        parser.error("--concurrency: none given")
    if options.algorithm in WITH_DRAFT_MODEL and options.draft_model is None:
        parser.error(f"--algorithm {options.algorithm} needs --draft-model-path")
    if options.mem_fraction is not None and options.max_total_tokens is not None:
        parser.error("--mem-fraction-static and --max-total-tokens are two ways to say the same: give one")
    speculates = any(mode.speculates for mode in options.modes)
    if speculates and options.algorithm == "NGRAM" and any(draft.chain for draft in options.drafts):
        parser.error("--algorithm NGRAM drafts trees at any breadth: use --draft tree8 or the like")
    if speculates and options.accept is not None:
        _check_accept(options, options.accept, parser)
    if speculates and options.algorithm == "NEXTN" and options.config and not _has_mtp(options.config):
        parser.error(f"{options.name} has no MTP layer: use --algorithm NGRAM, or --draft-model-path")
    vocabulary = text_config(options.config).get("vocab_size")
    if options.accept is not None and vocabulary is not None and vocabulary <= 100:
        parser.error("--accept: SGLang's simulated tokens have the id 100, beyond this vocabulary")


def _check_accept(options: Options, accept: float, parser: argparse.ArgumentParser) -> None:
    if accept < 1:
        parser.error("--accept: a step yields at least 1 token, the target's own")
    for draft in options.drafts:
        if accept > draft.longest:
            parser.error(f"--accept {accept:g}: {draft.name} accepts at most {draft.longest}")
        if not draft.chain and accept > 2:
            parser.error(
                f"--accept {accept:g}: SGLang simulates that the first nodes are accepted, whatever their parents. "
                f"In a tree ({draft.name}) only the first two are sure to be a path; use at most 2"
            )


def _has_mtp(config: dict[str, Any]) -> bool:
    """Qwen3-Next says nothing of its MTP layer; the others give a count."""
    text = text_config(config)
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if key in text:
            return bool(text[key])
    return text.get("model_type") not in ("granitemoehybrid", "nemotron_h", "falcon_h1")


if __name__ == "__main__":
    parse()
