"""One load: SGLang's bench_serving, called in this process (its imports take longer than many a load)."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from . import shapes
from .loads import BenchServing
from .options import Options

FLUSH_SECONDS = 30.0
PROGRAM = "sglang.benchmark.serving"
#: What of bench_serving's result is kept, under its own names.
KEPT = (
    *("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "input_throughput"),
    *("output_throughput", "total_throughput", "max_output_tokens_per_s", "concurrency", "max_concurrent_requests"),
    *(f"{figure}_{name}_ms" for name in ("ttft", "tpot", "itl") for figure in ("mean", "median", "p99")),
    *("mean_e2e_latency_ms", "p99_e2e_latency_ms", "accept_length"),
)


class ClientError(RuntimeError):
    """A load was not answered in full."""


def tokenizer(options: Options, model: Path | str) -> str:
    """Where the tokenizer of ``model`` lies."""
    return str(Path(model) / shapes.TOKENIZER if options.shape is not None else model)


def arguments(options: Options, load: BenchServing, *, url: str, model: Path | str, output: Path) -> list[str]:
    """The flags of bench_serving for ``load``: prompts of random ids, every answer of full length."""
    flags = ["--backend", "sglang", "--base-url", url, "--model", str(model), "--tokenizer", tokenizer(options, model)]
    flags += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0"]
    flags += ["--random-input-len", str(options.input_len), "--random-output-len", str(options.output_len)]
    flags += ["--num-prompts", str(load.prompts), "--seed", str(options.seed)]
    # It warms up with as many at once as in the load: batches of that size are compiled for before they are measured.
    return [
        *flags,
        *load.flags(),
        "--flush-cache",
        "--disable-tqdm",
        "--output-file",
        str(output),
        *options.client_args,
    ]


def patient(flush: Callable[..., None], seconds: float = FLUSH_SECONDS) -> Callable[..., None]:
    """``flush``, asked again for a while: 0.5.17 refuses it as long as the last warm-up answer is being wound up."""

    def again(*arguments: Any) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                return flush(*arguments)
            except Exception:  # requests' errors; bench_serving's own import of it is not loaded with this module
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    return again


def run(flags: Sequence[str], output: Path, log: Path) -> dict[str, Any]:
    """Run bench_serving with ``flags``, which name ``output``; what it prints goes to the end of ``log``.

    Raises
        ClientError: it failed.
    """
    from sglang.benchmark import serving

    output.unlink(missing_ok=True)
    with log.open("a", encoding="utf-8") as text:
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                flush = mock.patch.object(serving, "flush_server_cache", patient(serving.flush_server_cache))
                with flush, mock.patch.object(sys, "argv", [PROGRAM, *flags]):
                    serving.cli_main()
        except (Exception, SystemExit) as error:
            raise ClientError(f"bench_serving: {type(error).__name__}: {error}; see {log}") from error
    return json.loads(output.read_text().splitlines()[-1])


def kept(result: dict[str, Any], prompts: int) -> dict[str, Any]:
    """The figures of ``result`` for the record.

    Raises
        ClientError: not every request was answered.
    """
    if result.get("completed") != prompts:
        raise ClientError(f"bench_serving: {result.get('completed')} of {prompts} requests were answered")
    return {name: result.get(name) for name in KEPT}


def measure(options: Options, load: BenchServing, *, url: str, model: Path | str) -> tuple[dict[str, Any], str]:
    """Run ``load`` against the server at ``url``.

    Returns
        what its entry says, and the same in a line for people.

    Raises
        ClientError: it failed, or not every request was answered.
    """
    output = options.logs / "client.jsonl"
    flags = arguments(options, load, url=url, model=model, output=output)
    figures = kept(run(flags, output, options.logs / "client.log"), load.prompts)
    return {"command": shlex.join(["python", "-m", PROGRAM, *flags]), "bench_serving": figures}, (
        f"{figures['output_throughput']:.1f} tokens/s, TTFT {figures['median_ttft_ms']:.0f} ms, "
        f"TPOT {figures['median_tpot_ms']:.2f} ms"
    )
