"""One model: questions without speculation, the same with it, and what came of it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from . import client, compare, memory
from .client import Batch
from .memory import SpeculativeState
from .options import DATA, Options
from .progress import Progress
from .server import Server, ServerError

# On a GPU: backends a bare machine has; sizes, as the memory left would be millions of tokens of a tiny model; graphs
# for decode and verify, which are under test, but not for prefill, which would double the start-up.
DEVICE_FLAGS = {
    "cpu": ["--device", "cpu"],
    "cuda": [
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--max-total-tokens", "131072", "--max-running-requests", "32", "--max-mamba-cache-size", "160"),
        "--disable-prefill-cuda-graph",
    ],
}
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Run:
    """One server's answers. state: bytes for speculation, None if the plugin says nothing of itself."""

    command: tuple[str, ...]
    log: Path
    start_seconds: float
    announced: str | None
    batch: Batch
    accuracy: float
    state: SpeculativeState | None


@dataclass(frozen=True)
class Outcome:
    """Both runs of a model. verdicts: one per request whose output differs. failures: empty if all is as it must be."""

    model: Path
    plain: Run
    speculative: Run
    verdicts: tuple[compare.Verdict, ...]
    failures: tuple[str, ...]

    @property
    def requests(self) -> int:
        return len(self.plain.batch.answers)

    @property
    def identical(self) -> int:
        """Requests whose outputs are equal token for token."""
        return self.requests - len(self.verdicts)

    @property
    def ties(self) -> int:
        """Requests that differ only at a tie."""
        return sum(verdict.tie for verdict in self.verdicts)


def attention_backend(model: Path) -> str:
    """Triton, or FlashInfer for Nemotron-H, which SGLang refuses to serve with Triton attention."""
    architectures = json.loads((model / "config.json").read_text()).get("architectures", [])
    return "flashinfer" if any(name.startswith("NemotronH") for name in architectures) else "triton"


def server_command(options: Options, model: Path, speculate: bool) -> list[str]:
    """The ``launch_server`` command, without host and port."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", options.dtype]
    command += [*DEVICE_FLAGS[options.device], "--random-seed", str(options.seed)]
    if options.device == "cuda":
        command += ["--attention-backend", attention_backend(model)]
    if options.mode is not None:
        command += ["--mamba-mtp-mode", options.mode]
    if speculate:
        command += options.speculation.flags()
    return [*command, *options.server_args]


class ModelRun:
    """Runs one model; ``logs`` is the folder of the servers' logs."""

    def __init__(self, options: Options, model: Path, logs: Path, progress: Progress) -> None:
        self.options = options
        self.model = model
        self.logs = logs
        self.progress = progress
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        shots = client.read_problems(DATA / "train.jsonl", options.shots + options.parallel)
        self.problems = client.read_problems(DATA / "test.jsonl", options.questions)
        shots, warm_up = shots[: options.shots], shots[options.shots :]

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text).ids

        self.shots = encode(client.shots_text(shots))
        self.warm_up = [encode(client.prompt_text(shots, problem.question)) for problem in warm_up]
        self.prompts = [encode(client.prompt_text(shots, problem.question)) for problem in self.problems]

    def __call__(self) -> Outcome:
        """Ask without speculation, then with it, then look at every difference.

        Raises
            ServerError: a server failed, or the plugin was not loaded.
        """
        self.progress.say(f"{self.model.name}: {self.options.speculation.text}, {self.options.device}", "bold")
        plain = self._run("no speculation", speculate=False)
        speculative = self._run("speculation", speculate=True)
        found = compare.differences(_tokens(plain), _tokens(speculative))
        verdicts = self._judge(found, _tokens(speculative))
        failures = find_failures(self.options, plain, speculative, verdicts)
        return Outcome(self.model, plain, speculative, verdicts, failures)

    @contextlib.contextmanager
    def _serving(self, title: str, log_name: str, speculate: bool) -> Iterator[Server]:
        command = server_command(self.options, self.model, speculate)
        server = Server(command, device=self.options.device, log=self.logs / f"{self.model.name}-{log_name}.log")
        try:
            with self.progress.waiting(f"{title}: starting the server") as show:
                server.start(self.options.start_timeout, show)
            yield server
        finally:
            server.stop()

    def _run(self, title: str, speculate: bool) -> Run:
        options = self.options
        with self._serving(title, title.replace(" ", "-"), speculate) as server:
            announced = self._announced(server)
            state = self._state(server) if speculate else memory.NOTHING
            with self.progress.counting(f"{title}: warming up", 1 + len(self.warm_up)) as step:
                # The worked examples alone first: their state stays in the prefix cache for every question.
                client.ask(server, self.shots, WARM_UP_TOKENS)
                step()
                client.ask_all(
                    server,
                    self.warm_up,
                    max_new_tokens=options.max_new_tokens,
                    parallel=options.parallel,
                    on_answer=step,
                )
            with self.progress.counting(f"{title}: asking", len(self.prompts)) as step:
                batch = client.ask_all(
                    server,
                    self.prompts,
                    max_new_tokens=options.max_new_tokens,
                    parallel=options.parallel,
                    on_answer=step,
                )
        right = client.accuracy(batch.answers, self.problems)
        self.progress.say(
            f"{title}: server up in {server.start_seconds:.0f} s, {len(self.prompts)} answers in {batch.seconds:.1f} s"
        )
        return Run(tuple(server.command), server.log, server.start_seconds, announced, batch, right, state)

    def _announced(self, server: Server) -> str | None:
        announced = memory.announced(server.log.read_text(errors="replace"))
        if announced is None and self.options.mode != "off":
            raise ServerError(f"the server runs, but says nothing of the plugin: was it loaded?\n{server.tail()}")
        return announced

    def _state(self, server: Server) -> SpeculativeState | None:
        requests = server.get("/server_info").get("max_running_requests")
        return memory.speculative_state(server.log.read_text(errors="replace"), requests)

    def _judge(
        self, found: Sequence[compare.Difference], speculative: Sequence[Sequence[int]]
    ) -> tuple[compare.Verdict, ...]:
        if self.options.strict or not found:
            return tuple(compare.unjudged(difference) for difference in found)
        with self._serving(f"{len(found)} outputs differ: are they ties?", "ties", speculate=False) as server:
            return tuple(self._judge_one(server, difference, speculative) for difference in found)

    def _judge_one(
        self, server: Server, difference: compare.Difference, speculative: Sequence[Sequence[int]]
    ) -> compare.Verdict:
        scored = client.score(server, self.prompts[difference.request], speculative[difference.request])
        return compare.judge(difference, scored, self.options.tie_gap)


def find_failures(
    options: Options, plain: Run, speculative: Run, verdicts: Sequence[compare.Verdict]
) -> tuple[str, ...]:
    """Why the demo must not exit with 0, one line each."""
    failures = [
        f"accuracy {title} is {run.accuracy:.3f}, below {options.min_accuracy}"
        for title, run in (("without speculation", plain), ("with speculation", speculative))
        if run.accuracy < options.min_accuracy
    ]
    failures += [
        f"request {verdict.difference.request} differs at token {verdict.difference.position}: {verdict.reason}"
        for verdict in verdicts
        if not verdict.tie
    ]
    if speculative.batch.accept_length is None:
        failures.append("the server with speculation verified no drafts")
    return tuple(failures)


def _tokens(run: Run) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in run.batch.answers]
