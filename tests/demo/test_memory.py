"""Bytes of speculative state from a server's log."""

from __future__ import annotations

from mtp_demo import memory

LINE = (
    "[2026-11-21 02:00:00] mamba-mtp 0.1.0: mode snapshot, GDN model, speculative state 4.5 MiB (states 4.0 MiB, "
    "conv windows 0.5 MiB), 64 state slots, SGLang 0.5.17\n"
)
STATE = (
    ' | mamba-mtp state: {"mode": "snapshot", "family": "GDN", "speculative_bytes": 900, "request_rows": 9, '
    '"stock_bytes": 1800}\n'
)


def test_a_log_without_the_plugin_says_nothing():
    assert memory.announced("server up\n") is None
    assert memory.speculative_state("server up\n", 8) is None


def test_the_announcement_alone_is_rounded():
    state = memory.speculative_state(LINE, 8)
    assert state == memory.SpeculativeState("snapshot", 4718592, 524288, 4718592, False)
    assert memory.announced(LINE).startswith("mode snapshot, GDN model")


def test_what_follows_the_bar_is_exact_and_not_for_people():
    line = LINE.rstrip() + STATE
    state = memory.speculative_state(line, 8)
    assert state == memory.SpeculativeState("snapshot", 900, 100, 1800, True)
    assert memory.announced(line) == memory.announced(LINE)


def test_stock_serving_has_no_figures():
    state = memory.speculative_state("mamba-mtp 0.1.0: mode off; SGLang 0.5.17 serves unchanged\n", 8)
    assert (state.mode, state.total, state.per_request, state.stock_total) == ("off", None, None, None)
