"""What a server answers, made into records: text in, values out. No network, no clock."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from ..metrics.export import PREFIX

#: A value's name here, and the metrics that have it, the better one first. Colons are underscores: prometheus_client
#: writes ``sglang:x`` or ``sglang_x``, as it is asked. The ranks of data parallelism each have a part of these,
SUMMED: dict[str, tuple[str, ...]] = {
    "running": ("sglang_num_running_reqs",),
    "waiting": ("sglang_num_queue_reqs",),
    "throughput": ("sglang_gen_throughput",),
    "retracted": ("sglang_num_retracted_requests_total",),
    **{name: (f"{PREFIX}{name}",) for name in ("request_limit", "memory_request_limit")},
    **{
        name: (f"{PREFIX}{name}_total",)
        for name in ("verifies", "committed_tokens", "folds", "folded_tokens", "settles", "settled_tokens")
    },
}
#: and each of them has all of these.
AVERAGED: dict[str, tuple[str, ...]] = {
    "accept_length": (f"{PREFIX}accept_length", "sglang_spec_accept_length"),
    "slots_used": ("sglang_mamba_usage",),
    "kv_used": ("sglang_full_token_usage", "sglang_token_usage"),
    **{
        name: (f"{PREFIX}{name}",)
        for name in (
            "break_even_accept_length",
            "speculative_bytes",
            "stock_speculative_bytes",
            "slot_bytes",
            "state_slots",
            "pending_tokens_max",
            "window_tokens",
            "window_occupancy",
        )
    },
}
_RANKS = ("pp_rank", "tp_rank", "moe_ep_rank")


@dataclass(frozen=True)
class Sample:
    """One reading of ``/metrics``.

    Attributes
        values: by the names of `SUMMED` and `AVERAGED`; what is not exported is not in it.
        labels: ``mode``, ``family``, ``plugin_version`` and ``model_name``, as far as they are told.
    """

    values: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_plugin(self) -> bool:
        """Whether a mode of the plugin is served."""
        return "mode" in self.labels


@dataclass(frozen=True)
class Served:
    """What a server was started with; "" and {} where it does not say.

    Attributes
        parts: bytes a rank holds for speculation, by what they hold.
        radix: how the radix cache gets its states.
        drafts: algorithm and number of draft nodes.
    """

    sglang_version: str = ""
    model: str = ""
    radix: str = ""
    drafts: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)


def sample_of(text: str) -> Sample:
    """Read ``/metrics``.

    Raises
        ValueError: the text is not Prometheus' format.
    """
    series: dict[str, list[Series]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            series[each.name.replace(":", "_")].append(each)
    values: dict[str, float] = {}
    for table, combine in ((SUMMED, sum), (AVERAGED, _mean)):
        for name, metrics in table.items():
            found = next((series[metric] for metric in metrics if metric in series), None)
            if found is not None:
                values[name] = combine(each.value for each in _first_ranks(found))
    if "running" in values:  # a counter with labels is not exported before its first event
        values.setdefault("retracted", 0.0)
    told = [*series[f"{PREFIX}info"], *series["sglang_num_running_reqs"]]
    wanted = ("mode", "family", "plugin_version", "model_name")
    labels = {name: each.labels[name] for each in reversed(told) for name in wanted if name in each.labels}
    return Sample(values, labels)


def _first_ranks(series: Iterable[Series]) -> list[Series]:
    """Without the ranks that say what another has said: of each rank of data parallelism the first that publishes."""
    replicas: dict[str, list[Series]] = defaultdict(list)
    for each in series:
        replicas[each.labels.get("dp_rank", "")].append(each)

    def rank(each: Series) -> list[int]:
        return [int(text) if (text := each.labels.get(name, "0")).isdecimal() else 0 for name in _RANKS]

    firsts = []
    for replica in replicas.values():
        first = min(map(rank, replica))
        firsts += [each for each in replica if rank(each) == first]
    return firsts


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def served_of(text: str) -> Served:
    """Read ``/server_info``.

    Raises
        ValueError: the text is not a JSON object.
    """
    told = json.loads(text)
    if not isinstance(told, dict):
        raise ValueError("expected a JSON object")
    states = told.get("internal_states") or [{}]
    state = _mapping(_mapping(_mapping(states[0]).get("mamba_mtp")).get("state"))
    algorithm, nodes = told.get("speculative_algorithm"), told.get("speculative_num_draft_tokens")
    return Served(
        sglang_version=str(told.get("version") or ""),
        model=str(told.get("served_model_name") or told.get("model_path") or ""),
        radix=str(state.get("radix") or ""),
        drafts=f"{algorithm}, {nodes} nodes" if algorithm and nodes else str(algorithm or ""),
        parts={str(name): int(size) for name, size in _mapping(state.get("parts")).items()},
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
