"""The demo's flags. Standard library only: they are checked before the environment is set up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "launch" / "models"
DATA = MODELS / "data"
SHORT_NAMES = {"gdn": "tiny-gdn", "mamba2": "tiny-mamba2"}
ALGORITHMS = ("NEXTN", "NGRAM")
MODES = ("replay", "slots", "snapshot", "off")

# Logits are bfloat16 before the softmax: between 16 and 32 neighbouring values are 0.125 apart. A bound of two such
# steps allows each of the two logits to be rounded the other way; a wrong recurrent state moves logits by nats.
TIE_GAP = 0.25


@dataclass(frozen=True)
class Speculation:
    """How drafts are made. algorithm: NEXTN (the model's MTP head) or NGRAM; topk: branches a step (1 is a chain)."""

    algorithm: str
    steps: int
    topk: int
    draft_tokens: int

    def flags(self) -> list[str]:
        """The flags of ``sglang.launch_server``."""
        flags = ["--speculative-algorithm", self.algorithm, "--speculative-num-draft-tokens", str(self.draft_tokens)]
        if self.algorithm == "NGRAM":
            return [*flags, "--speculative-ngram-max-bfs-breadth", str(self.topk)]
        return [*flags, "--speculative-num-steps", str(self.steps), "--speculative-eagle-topk", str(self.topk)]

    @property
    def text(self) -> str:
        """For the table."""
        if self.algorithm == "NGRAM":  # trees at any breadth
            return f"NGRAM, breadth {self.topk}, {self.draft_tokens} draft tokens"
        shape = "chain" if self.topk == 1 else f"tree, topk {self.topk}"
        return f"{self.algorithm}, {self.steps} steps, {shape}, {self.draft_tokens} draft tokens"


@dataclass(frozen=True)
class Options:
    """What one run of the demo does; `parse` explains each field."""

    models: tuple[Path, ...]
    device: str
    dtype: str
    mode: str | None
    speculation: Speculation
    questions: int
    shots: int
    parallel: int
    max_new_tokens: int
    seed: int
    min_accuracy: float
    tie_gap: float
    json: Path | None
    logs: Path | None
    start_timeout: float
    server_args: tuple[str, ...]

    @property
    def strict(self) -> bool:
        """Must outputs be identical token for token? On a GPU a near-tie may flip."""
        return self.device == "cpu" and self.dtype == "float32"


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read and check the flags; exits with status 2 and a message where one is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    device = args.device or default_device()
    draft_tokens = args.draft_tokens or (args.steps + 1 if args.topk == 1 else 8)
    options = Options(
        models=_models(args.model, parser),
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        mode=args.mode,
        speculation=Speculation(args.algorithm, args.steps, args.topk, draft_tokens),
        questions=args.questions,
        shots=args.shots,
        parallel=args.parallel,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        min_accuracy=args.min_accuracy,
        tie_gap=args.tie_gap,
        json=args.json,
        logs=args.logs,
        start_timeout=args.start_timeout,
        server_args=tuple(args.server_arg),
    )
    _check(options, parser)
    return options


def default_device() -> str:
    """cuda where the NVIDIA driver is loaded, else cpu."""
    return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bash launch/demo.sh",
        usage="bash launch/demo.sh [flags]",
        description="Serve the tiny models with the plugin, ask held-out word problems without and with speculation, "
        "and compare. Exits 0 if accuracy and outputs are as they must be, 1 if not, 2 for wrong flags, 3 if a server "
        "fails, 128 + N after signal N (Ctrl-C: 130). Of the script itself: --version X (SGLang version), --python "
        "PATH (this interpreter, no set-up).",
    )
    add = parser.add_argument
    add("--model", action="append", metavar="gdn|mamba2|PATH", help="default: every model under launch/models")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is an NVIDIA GPU, else cpu")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, bfloat16 on cuda")
    add("--mode", choices=MODES, help="--mamba-mtp-mode of the server; default: the plugin's own")
    add("--algorithm", choices=ALGORITHMS, default="NEXTN", help="who drafts; default: %(default)s")
    add("--steps", type=_positive, default=3, help="draft steps of NEXTN; default: %(default)s")
    add("--topk", type=_positive, default=1, help="branches (1: a chain; NGRAM: search breadth); default: %(default)s")
    add("--draft-tokens", type=_positive, help="nodes verified a step, root included; default: steps + 1, trees 8")
    add("--questions", type=_positive, default=24, help="held-out questions; default: %(default)s")
    add("--shots", type=_positive, default=5, help="worked examples before each question; default: %(default)s")
    add("--parallel", type=_positive, default=4, help="questions asked at a time; default: %(default)s")
    add("--max-new-tokens", type=_positive, default=160, help="longest answer; default: %(default)s")
    add("--seed", type=int, default=0, help="the server's random seed; default: %(default)s")
    add("--min-accuracy", type=_share, default=0.9, help="fail below it; default: %(default)s")
    add("--tie-gap", type=float, default=TIE_GAP, help="nats between the top two at a tie (cuda); default: %(default)s")
    add("--json", type=Path, metavar="PATH", help="also write the results here")
    add("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs here; default: a temporary folder")
    add("--start-timeout", type=float, default=600, help="seconds a server may take to start; default: %(default)s")
    add("--server-arg", action="append", default=[], metavar="ARG", help="one more argument of launch_server")
    return parser


def _models(wanted: list[str] | None, parser: argparse.ArgumentParser) -> tuple[Path, ...]:
    if wanted:
        paths = [MODELS / SHORT_NAMES[name] if name in SHORT_NAMES else Path(name).resolve() for name in wanted]
    else:
        paths = sorted(config.parent for config in MODELS.glob("*/config.json"))
        if not paths:
            parser.error(f"no model under {MODELS}; train one with python launch/train/train.py, or give --model PATH")
    for path in paths:
        if not (path / "config.json").is_file():
            parser.error(f"--model: {path} has no config.json")
        if not (path / "tokenizer.json").is_file():
            parser.error(f"--model: {path} has no tokenizer.json")
    return tuple(paths)


def _check(options: Options, parser: argparse.ArgumentParser) -> None:
    speculation = options.speculation
    if speculation.draft_tokens < 2:
        parser.error("--draft-tokens: at least 2, the root and one draft")
    if speculation.algorithm == "NEXTN":
        if speculation.topk == 1 and speculation.draft_tokens != speculation.steps + 1:
            parser.error(f"--draft-tokens: a chain of {speculation.steps} steps has {speculation.steps + 1}")
        for path in options.models:
            if not json.loads((path / "config.json").read_text()).get("num_nextn_predict_layers", 1):
                parser.error(f"--algorithm NEXTN: {path} has no MTP head; use --algorithm NGRAM")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no folder {options.json.absolute().parent}")
    for name, available in (("test.jsonl", options.questions), ("train.jsonl", options.shots + options.parallel)):
        with (DATA / name).open() as lines:
            count = sum(1 for _ in lines)
        if available > count:
            parser.error(f"{available} problems wanted of {DATA / name}, which has {count}")


if __name__ == "__main__":
    parse()
