"""The loop: each server once, all of its loads while it runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import client, conversations, logs, shapes
from .client import ClientError
from .loads import Arrivals, Conversations, Load, Requests
from .options import ROOT, Options
from .plan import Serving, plan
from .progress import Progress, clock
from .record import Record, check_env
from .server import Server, ServerError

#: Seconds assumed for what was never seen: a start, and a load.
UNSEEN_START, UNSEEN_LOAD = 60.0, 20.0
STOPPING = 10.0
#: Who drives which kind of load.
DRIVERS: dict[type[Load], Callable[..., tuple[dict[str, Any], str]]] = {
    Requests: client.measure,
    Arrivals: client.measure,
    Conversations: conversations.measure,
}


class OutOfTime(Exception):
    """The next step would not end within the time limit."""


class Benchmark:
    """Measures what ``record`` lacks. model: what the servers load."""

    def __init__(self, options: Options, record: Record, progress: Progress) -> None:
        self.options = options
        self.record = record
        self.progress = progress
        self.servings, refused = plan(options)
        record.content["refused"].update(refused)
        self.model: Path | str = options.model
        if options.shape is not None:
            self.model = shapes.make(options.shape, ROOT / ".cache" / "shapes" / options.shape.name)

    def __call__(self) -> None:
        """Run every server that still has loads to get.

        Raises
            OutOfTime: the time limit is too near; the rest is for another call.
        """
        options = self.options
        for name, reason in self.record.content["refused"].items():
            self.progress.say(f"{name}: left out, {reason}")
        todo = [(serving, self._missing(serving)) for serving in self.servings]
        done = sum(len(options.loads) - len(loads) for _, loads in todo)
        if done:
            self.progress.say(f"{done} of {len(self.servings) * len(options.loads)} loads are in {self.record.path}")
        todo = [(serving, loads) for serving, loads in todo if loads]
        if not todo:
            return
        if not self.record.content["environment"]:
            self.record.content["environment"] = check_env()
        for number, (serving, loads) in enumerate(todo):
            later = [rest for _, rest in todo[number + 1 :]]
            title = f"{serving.title} (server {number + 1} of {len(todo)})"
            try:
                self._serve(serving, loads, later, title)
            except (ServerError, ClientError) as error:
                self.record.fail(f"{serving.name}: {error}")
                self.progress.say(f"{serving.name}: FAILED: {str(error).splitlines()[0]}")

    def _missing(self, serving: Serving) -> list[Load]:
        return [load for load in self.options.loads if not self.record.has(serving, load)]

    def _serve(self, serving: Serving, loads: list[Load], later: list[list[Load]], title: str) -> None:
        self._afford(self._start_estimate() + self._load_estimate(loads[0]))
        name = serving.name.replace("/", "-")
        log = self.options.logs / f"{len(self.record.content['servers']):02}-{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        server = Server(self.options, serving, self.model, log)
        with server.stopped_afterwards():
            to_go = clock(self._to_go(loads, later) + self._start_estimate())
            with self.progress.waiting(
                f"{title}: starting; about {to_go} to go", lambda: f"{serving.title}: {logs.stage(logs.read(log))}"
            ):
                server.start()
            started = logs.at_start(logs.read(log))
            running = started["max_running_requests"]
            self.progress.say(f"  up in {server.start_seconds:.0f} s, memory for {running} requests at once")
            number = self.record.add_server(
                serving,
                command=shlex.join(server.command),
                environment=server.environment,
                start_seconds=server.start_seconds,
                log=log.name,
                **started,
            )
            for position, load in enumerate(loads):
                self._afford(self._load_estimate(load))
                self._load(server, load, number, self._to_go(loads[position:], later))

    def _load(self, server: Server, load: Load, number: int, to_go: float) -> None:
        begin = logs.size(server.log)

        def news() -> str:
            lines = logs.decodes(logs.read(server.log, begin))
            return f"{lines[-1].running} running, {lines[-1].tokens_per_second:.0f} tokens/s" if lines else "prefilling"

        began = time.monotonic()
        title = f"  {load.name}: {load.prompts} prompts; about {clock(to_go)} to go"
        with self.progress.waiting(title, news):
            facts, told = DRIVERS[type(load)](self.options, load, url=server.url, model=self.model)
        seen = logs.under_load(logs.read(server.log, begin))
        seconds = time.monotonic() - began
        self.record.add_load(server.serving, load, number, seconds=seconds, **facts, server_log=seen)
        self.progress.say(f"  {load.name}: {told}, {seen['running_peak']} running")

    def _afford(self, seconds: float) -> None:
        limit = self.options.time_limit
        if limit is not None and self.progress.seconds + seconds + STOPPING > limit:
            raise OutOfTime(f"{clock(seconds)} more would pass the limit of {clock(limit)}")

    def _start_estimate(self) -> float:
        starts = [entry["start_seconds"] for entry in self.record.content["servers"]]
        return starts[-1] if starts else UNSEEN_START  # the latest: a machine's first start compiles kernels

    def _load_estimate(self, load: Load) -> float:
        return max(self.record.seconds(load), default=load.least_seconds + UNSEEN_LOAD)

    def _to_go(self, loads: list[Load], later: list[list[Load]]) -> float:
        servers = len(later) * (self._start_estimate() + STOPPING)
        return servers + sum(map(self._load_estimate, [*loads, *(load for rest in later for load in rest)]))
