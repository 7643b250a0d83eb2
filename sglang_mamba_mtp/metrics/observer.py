"""What one scheduler knows about its speculation, gathered where SGLang logs or is asked: never in between.

When each value is read, and how old it may be:

* accept length, batch: from SGLang's own counters on the host, at every decode log interval
  (``--decode-log-interval``, 40 steps).
* pending tokens, folds, settles: lie on the device. Whenever SGLang sets its own metrics (every log interval, every
  prefill, and while idle) a copy to the host is started and the copy before it is exported. Neither the host nor the
  forward waits. ``/server_info`` reads them at once; it waits for the scheduler's stream, not for a step.
* limits and bytes: settled at start.

Folds and settles are counted with ``--enable-metrics`` only: a few small launches in each commit. Everything else costs
a step nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from .. import __version__
from ..compat import startup
from ..costs.step import Drafting, StepModel, machine_named, state_traffic
from ..state.counts import COUNTED, Counts
from ..state.store import DraftStore
from ..state.window import Window
from .export import Exporter
from .facts import Facts
from .losing import Losing
from .reading import Reading

logger = logging.getLogger(__name__)


class Observer:
    """Watches a scheduler whose target model is served by one of the plugin's modes."""

    def __init__(self, reporter: Any, facts: Facts) -> None:
        """``reporter`` is SGLang's `SchedulerMetricsReporter`, whose scheduler has its pools."""
        scheduler = reporter.scheduler
        runner = scheduler.tp_worker.model_runner
        self._scheduler, self._facts = scheduler, facts
        self._request_pool = runner.req_to_token_pool
        self._store: DraftStore | None = getattr(self._request_pool.mamba_pool, "store", None)
        self._warns = bool(reporter.is_stats_logging_rank)
        self._exporter: Exporter | None = None
        if reporter.current_scheduler_metrics_enabled and self._store is not None:
            self._store.counts = Counts(self._store.states.device)
        self._reading = Reading(3 + len(COUNTED), self._request_pool.req_to_token.device)
        self._model = step_model(runner, facts)
        self._drafting = drafting_of(runner.server_args)
        self._losing = Losing()
        self._calls = self._verifies = self._committed = 0
        self._last: dict[str, float] = {}
        if reporter.current_scheduler_metrics_enabled:
            self._exporter = Exporter(reporter.metrics_collector)
            self._export_facts(self._exporter)

    # --------------------------------------------------------------------------------------------- host: accept length

    def stepped(self) -> None:
        """A decode step was reported."""
        self._calls += 1

    def interval(self, verifies: int, committed: int) -> None:
        """SGLang has closed a log interval: ``verifies`` verifies of one request each yielded ``committed`` tokens."""
        steps, self._calls = max(1, self._calls), 0
        self._verifies += verifies
        self._committed += committed
        accept_length, batch = committed / verifies, verifies / steps
        self._last = {"accept_length": accept_length, "verify_batch": batch}
        break_even = self._break_even(batch)
        if break_even is not None:
            self._last["break_even_accept_length"] = break_even
        loses = break_even is not None and accept_length < break_even
        if self._exporter is not None:
            for name, value in self._last.items():
                self._exporter.set(name, value)
            self._exporter.raise_to("verifies", self._verifies)
            self._exporter.raise_to("committed_tokens", self._committed)
            self._exporter.add("losing_intervals", int(loses))
        if break_even is not None and self._warns:
            warning = self._losing.warning(accept_length, break_even, batch)
            if warning is not None:
                logger.warning(warning)

    def _break_even(self, batch: float) -> float | None:
        if self._model is None:
            return None
        requests = self._scheduler.running_batch.reqs
        context = sum(req.seqlen for req in requests) / len(requests) if requests else 0.0
        traffic = state_traffic(self._facts.mode, self._drafting, self._window_threshold)
        return self._model.break_even(batch, context, self._drafting, traffic)

    # ------------------------------------------------------------------------------------------ device: pending, folds

    @property
    def _window_threshold(self) -> int:
        return self._store.shape.threshold if isinstance(self._store, Window) else 0

    @property
    def _window_tokens(self) -> int:
        """The most pending tokens a request can have: what a verify does not fold, and a whole path more."""
        return self._store.shape.threshold + self._store.nodes if isinstance(self._store, Window) else 0

    def _on_device(self) -> torch.Tensor:
        """[rows running, their pending tokens, the most of one, *COUNTED], int64 on the device."""
        store, device = self._store, self._request_pool.req_to_token.device
        batch = self._scheduler.running_batch
        rows = batch.req_pool_indices if batch.reqs else None  # SGLang leaves the rows of the last batch behind
        values = torch.zeros(3 + len(COUNTED), dtype=torch.int64, device=device)
        if rows is not None and isinstance(store, Window):
            pending = store.pending[self._request_pool.get_mamba_indices(rows).clamp(min=0).to(torch.int64)]
            values[0].fill_(rows.shape[0])
            values[1] = pending.sum()
            values[2] = pending.max()
        if store is not None and store.counts is not None:
            values[3:] = store.counts.values
        return values

    def publish(self) -> None:
        """SGLang is setting its own metrics: start a copy from the device, export the one before."""
        if self._exporter is None or self._store is None:
            return
        self._reading.request(self._on_device())
        values = self._reading.newest()
        if values is None:
            return
        for name, value in self._window_values(values).items():
            self._exporter.set(name, value)
        for name, total in zip(COUNTED, values[3:], strict=True):
            self._exporter.raise_to(name, total)

    def _window_values(self, values: list[int]) -> dict[str, float]:
        rows, pending, most = values[:3]
        if not isinstance(self._store, Window):
            return {}
        return {
            "pending_tokens": pending,
            "pending_tokens_max": most,
            "window_occupancy": pending / (rows * self._window_tokens) if rows else 0.0,
        }

    # --------------------------------------------------------------------------------------------------------- answers

    def _export_facts(self, exporter: Exporter) -> None:
        facts = self._facts
        exporter.info(mode=facts.mode, family=facts.family, plugin_version=__version__)
        exporter.set("speculative_bytes", facts.speculative_bytes)
        exporter.set("stock_speculative_bytes", facts.stock_bytes)
        exporter.set("saved_bytes", facts.saved_bytes)
        exporter.set("slot_bytes", facts.slot_bytes)
        exporter.set("state_slots", facts.state_slots)
        exporter.set("request_limit", facts.request_limit)
        exporter.set("memory_request_limit", facts.memory_limit)
        if isinstance(self._store, Window):
            exporter.set("window_tokens", self._window_tokens)

    def report(self) -> dict[str, Any]:
        """For ``/server_info``; reads the device now."""
        values = self._on_device().tolist()
        counted = self._store is not None and self._store.counts is not None
        return {
            "version": __version__,
            "state": self._facts.report(),
            "running_requests": len(self._scheduler.running_batch.reqs),
            "verifies": self._verifies,
            "committed_tokens": self._committed,
            **self._last,
            **self._window_values(values),
            **({"window_tokens": self._window_tokens} if isinstance(self._store, Window) else {}),
            **(dict(zip(COUNTED, values[3:], strict=True)) if counted else {}),
        }


def drafting_of(server_args: Any) -> Drafting:
    """How a server drafts, from its resolved arguments."""
    args = startup.resolved(server_args)
    ngram = str(args.speculative_algorithm).upper() == "NGRAM"
    return Drafting(
        nodes=int(args.speculative_num_draft_tokens),
        chain=not ngram and int(args.speculative_eagle_topk or 1) == 1,
        forwards=0 if ngram else int(args.speculative_num_steps or 1),
    )


def step_model(runner: Any, facts: Facts) -> StepModel | None:
    """The times of a running model's steps; None where its configuration is not understood.

    Weights are taken at their real size, so quantised ones count as what they are.
    """
    device = str(runner.device)
    machine = machine_named(torch.cuda.get_device_name(runner.gpu_id) if device.startswith("cuda") else device)
    try:
        size = startup.size_of_model(runner.model_config)
    except ValueError as error:
        logger.debug("mamba-mtp: no break-even accept length: %s", error)
        return None
    weights = sum(tensor.nbytes for tensor in runner.model.state_dict().values())
    ranks = startup.attention_ranks()
    return StepModel(
        size=size,
        parameter_bytes=weights * ranks / size.total,
        state_bytes=facts.slot_bytes * ranks,
        kv_bytes=startup.kv_bytes_per_token(runner.model_config, runner.kv_cache_dtype),
        ranks=ranks,
        machine=machine,
    )
