"""What is read of a server's log. The lines are SGLang's, 0.5.17 and 0.5.23."""

from __future__ import annotations

import pytest
from mtp_bench import logs

START = """\
[2026-11-21 18:55:01] Load weight begin. avail mem=138.20 GB
[2026-11-21 18:55:09 TP0] Mamba Cache is allocated. max_mamba_cache_size: 177, conv_state size: 0.34GB, ssm_state \
size: 12.45GB intermediate_ssm_state_cache size: 17.80GB intermediate_conv_window_cache size: 0.12GB 
[2026-11-21 18:55:10 TP0] GDN ReplaySSM ring buffers allocated (record_len=4, fold=True): d=0.1GB
[2026-11-21 18:55:12 TP0] mamba-mtp 0.1.0: mode replay, GDN model, speculative state 0.5 MiB (windows 0.5 MiB)
[2026-11-21 18:55:12 TP0] mamba-mtp state: {"mode": "replay", "speculative_bytes": 503888, "request_rows": 5}
[2026-11-21 18:55:13 TP0] Capture cuda graph begin. This can take up to several minutes.
[2026-11-21 18:55:20 TP0] max_total_num_tokens=1032768, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=59, context_len=262144, available_gpu_mem=9.31 GB
"""
DECODE = (
    "[2026-11-21 18:56:0{second} TP0] Decode batch, #running-req: {running}, #full token: 512, full token usage: 0.01, "
    "mamba num: 8, mamba usage: 0.12, {accept}cuda graph: True, gen throughput (token/s): {speed}, #queue-req: {queued}"
)


def line(running, speed, *, accept="", queued=0, second=1):
    return DECODE.format(running=running, speed=speed, accept=accept, queued=queued, second=second) + "\n"


ACCEPT = "accept len: {}, accept rate: 0.66, "


def test_memory_at_start():
    found = logs.at_start(START)
    assert found["max_running_requests"] == 59
    assert found["max_total_tokens"] == 1032768
    assert found["available_gb"] == 9.31
    assert found["state_slots"] == 177
    assert found["state_gb"] == {
        "conv_state": 0.34,
        "ssm_state": 12.45,
        "intermediate_ssm_state_cache": 17.8,
        "intermediate_conv_window_cache": 0.12,
    }
    assert found["plugin"]["speculative_bytes"] == 503888
    assert any(line.startswith("ReplaySSM ring buffers") for line in found["lines"])
    assert any(line.startswith("mamba-mtp 0.1.0: mode replay") for line in found["lines"])


def test_a_log_that_says_nothing():
    found = logs.at_start("")
    assert found["max_running_requests"] is None and found["plugin"] is None and found["lines"] == []
    assert logs.under_load("")["running_peak"] is None


def test_a_load():
    text = (
        line(1, 99.0, accept=ACCEPT.format("1.00"))
        + "[2026-11-21 18:56:00 TP0] Cache flushed successfully!\n"
        + line(2, 10.0, accept=ACCEPT.format("2.00"))
        + line(10, 100.0, accept=ACCEPT.format("3.00"), queued=6)
        + line(9, 120.0, accept=ACCEPT.format("4.00"))
        + "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 7\n"
        + "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 7\n"
    )
    assert logs.under_load(text) == {
        "running_peak": 10,
        "running_mean": 7.0,
        "queued_peak": 6,
        "decode_tokens_per_second": 110.0,
        "retractions": 4,
        "accept_length": 3.0,
        "decode_lines": 3,
    }


def test_without_speculation_nothing_is_accepted():
    assert logs.under_load(line(1, 5.0))["accept_length"] is None


@pytest.mark.parametrize(("lines", "said"), [(0, "importing"), (1, "making weights"), (3, "allocating memory"),
                                             (7, "warming up"), (6, "capturing CUDA graphs")])  # fmt: skip
def test_stages_of_a_start(lines, said):
    assert logs.stage("".join(START.splitlines(keepends=True)[:lines])) == said


def test_logs_that_grow(tmp_path):
    path = tmp_path / "log"
    assert (logs.read(path), logs.size(path)) == ("", 0)
    path.write_text("one\ntwo\n")
    assert logs.read(path, 4) == "two\n"
    assert logs.read(path, 0, 4) == "one\n"
    assert logs.size(path) == 8
    assert logs.tail(path, 1).splitlines()[1] == "two"
