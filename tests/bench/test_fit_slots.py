"""fit_slots.py: what it reads from logs, and engines of tiny models on the CPU."""

from __future__ import annotations

import json

import pytest

fit_slots = pytest.importorskip("fit_slots")

WIDE = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 64}

LOG = """\
[2026-11-21 05:00:00] mamba-mtp memory: windows 0.004 GiB in place of 0.019 GiB of per-draft states; state slots 7
[2026-11-21 05:00:01] mamba-mtp 0.1.0: mode replay, GDN model, speculative state 1.0 MiB (windows 1.0 MiB)
[2026-11-21 05:00:01] mamba-mtp state: {"mode": "replay", "speculative_bytes": 12, "parts": {"windows": 12}}
"""


def test_log_lines():
    assert fit_slots.state_line(LOG) == {"mode": "replay", "speculative_bytes": 12, "parts": {"windows": 12}}
    assert fit_slots.memory_line(LOG).endswith("state slots 7")
    assert fit_slots.state_line("") is None and fit_slots.memory_line("") is None


def test_layers_are_the_real_models():
    pattern = fit_slots.CONFIGS["mamba2"]["hybrid_override_pattern"]
    assert [len(pattern), pattern.count("M"), pattern.count("*")] == [56, 27, 4]


def test_table(capsys):
    facts = {"family": "gdn", "nodes": 4, "state_slots": 3, "requests": 1, "kv_tokens": 9}
    off = {**facts, "mode": "off", "speculative_bytes_per_request": 2**22}
    fit_slots.print_table([off, {**facts, "mode": "replay", "speculative_bytes_per_request": 2**20}])
    assert capsys.readouterr().out.splitlines()[-1].endswith("1.0 MiB | 25.0%")
    fit_slots.print_table([{**off, "mode": "slots"}])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_engines_of_tiny_models(family, tmp_path):
    from tests.engine import models

    # real states are larger than windows, those of the tiny models are not
    config = {"gdn": models.QWEN3_NEXT, "mamba2": models.NEMOTRON_H}[family] | WIDE
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"family": family, "model": str(tmp_path), "nodes": 4, "device": "cpu"}
    options |= {"memory_gib": 0.02, "max_running_requests": 4, "port": 20000}
    off, slots, replay = (fit_slots.measure({**options, "mode": mode}) for mode in ("off", "slots", "replay"))
    assert 0 < off["state_slots"] < slots["state_slots"] < replay["state_slots"]
    assert replay["speculative_bytes_per_request"] < off["speculative_bytes_per_request"]
    per_request = 3 * off["slot_bytes"]  # the root's state goes where it was read from
    assert per_request <= slots["speculative_bytes_per_request"] < 1.1 * per_request
    fit_slots.print_table([off, slots, replay])
