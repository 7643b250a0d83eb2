"""The plugin's Prometheus metrics, in the registry and under the labels of SGLang's own.

Their names have no colon, unlike SGLang's: Prometheus up to 2 is given underscores for colons by prometheus_client, and
Prometheus 3 is not.
"""

from __future__ import annotations

from typing import Any

PREFIX = "sglang_mamba_mtp_"

GAUGES: dict[str, str] = {
    "speculative_bytes": "Bytes held for speculation beside the state slots, on this rank.",
    "stock_speculative_bytes": "Bytes SGLang's own verify would hold for as many requests, on this rank.",
    "saved_bytes": "stock_speculative_bytes - speculative_bytes.",
    "slot_bytes": "Bytes of one state slot (recurrent and convolution states, all layers), on this rank.",
    "state_slots": "State slots that running requests and the prefix cache share.",
    "request_limit": "The most requests that run at a time.",
    "memory_request_limit": "Requests there are state slots for.",
    "pending_tokens": "Replay: committed tokens of the running requests that are not in their states yet.",
    "pending_tokens_max": "Replay: the most such tokens any running request has.",
    "window_tokens": "Replay: the most such tokens a request can have.",
    "window_occupancy": "Replay: pending tokens of the running requests, as a share of what their windows hold.",
    "accept_length": "Tokens a verify yielded for a request, over SGLang's last decode log interval.",
    "verify_batch": "Requests a verify had, over SGLang's last decode log interval.",
    "break_even_accept_length": "Estimate: accept length at which speculation is as fast as plain decoding.",
}

COUNTERS: dict[str, str] = {
    "verifies": "Verifies of one request each (a step of n requests counts n).",
    "committed_tokens": "Tokens that verifies have yielded.",
    "losing_intervals": "Decode log intervals with an accept length below break-even.",
    "folds": "Replay: requests whose pending tokens a verify folded into their state.",
    "folded_tokens": "Replay: tokens folded by verifies.",
    "settles": "States brought up to date because something other than a verify was about to read them.",
    "settled_tokens": "Replay: tokens folded by settling.",
}

INFO_LABELS = ("mode", "family", "plugin_version")


class Exporter:
    """Sets the metrics of one scheduler.

    Import of prometheus_client waits until here: SGLang names the folder of its multiprocess mode first.
    """

    def __init__(self, collector: Any) -> None:
        """``collector`` is SGLang's `SchedulerMetricsCollector`: its labels, and classes of its own if it has some."""
        import prometheus_client

        gauge = getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge
        counter = getattr(collector, "_counter_cls", None) or prometheus_client.Counter
        self._labels = dict(collector.labels)
        names = tuple(self._labels)
        self._gauges = {
            name: gauge(name=PREFIX + name, documentation=text, labelnames=names, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._counters = {
            name: counter(name=f"{PREFIX}{name}_total", documentation=text, labelnames=names)
            for name, text in COUNTERS.items()
        }
        self._info = gauge(
            name=f"{PREFIX}info",
            documentation="1; what the plugin serves is in the labels.",
            labelnames=(*names, *INFO_LABELS),
            multiprocess_mode="mostrecent",
        )
        self._totals = dict.fromkeys(COUNTERS, 0)
        for name in COUNTERS:  # a counter is 0 before its first event, not absent
            self._counters[name].labels(**self._labels).inc(0)

    def info(self, **labels: str) -> None:
        """Say what is served; ``labels`` are `INFO_LABELS`."""
        self._info.labels(**self._labels, **labels).set(1)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._gauges[name].labels(**self._labels).set(value)

    def add(self, name: str, amount: int) -> None:
        """Add to a counter."""
        self.raise_to(name, self._totals[name] + amount)

    def raise_to(self, name: str, total: int) -> None:
        """Bring a counter up to a total counted elsewhere."""
        self._counters[name].labels(**self._labels).inc(max(0, total - self._totals[name]))
        self._totals[name] = max(total, self._totals[name])
