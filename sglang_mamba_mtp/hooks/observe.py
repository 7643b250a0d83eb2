"""What the hooks do where SGLang logs its statistics or is asked for them (`metrics.observer`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..metrics.observer import Observer
from . import startup

_OBSERVER = "_mamba_mtp_observer"


def _observer(reporter: Any) -> Observer | None:
    return vars(reporter).get(_OBSERVER)


def watch_scheduler(result: None, reporter: Any) -> None:
    """AFTER `SchedulerMetricsReporter.__post_init__`: pools and backends are there, nothing was served yet."""
    facts = startup.facts(reporter.scheduler.tp_worker.model_runner)
    if facts is None:
        return
    observer = Observer(reporter, facts)
    for owner in (reporter, reporter.metrics_collector):  # there is no collector without --enable-metrics
        if owner is not None:
            setattr(owner, _OBSERVER, observer)


def watch_decode(original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `report_decode_stats`, which SGLang calls in every decode step and which clears the counters of its log
    interval when that is over."""
    observer = _observer(reporter)
    if observer is None:
        return original(reporter, *args, **kwargs)
    observer.stepped()
    verifies, committed = reporter.spec_num_forward_ct, reporter.spec_num_accept_tokens
    original(reporter, *args, **kwargs)
    if verifies and not reporter.spec_num_forward_ct:
        observer.interval(verifies, committed)


def publish(result: None, collector: Any, stats: Any) -> None:
    """AFTER `SchedulerMetricsCollector.log_stats`: SGLang has set its own metrics."""
    observer = vars(collector).get(_OBSERVER)
    if observer is not None:
        observer.publish()


def tell_internal_state(result: Any, scheduler: Any, request: Any) -> None:
    """AFTER `Scheduler.get_internal_state`: ``mamba_mtp`` in each of the ``internal_states`` of ``/server_info``."""
    observer = _observer(scheduler.metrics_reporter)
    if observer is not None:
        result.internal_state["mamba_mtp"] = observer.report()
