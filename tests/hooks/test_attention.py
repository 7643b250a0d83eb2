"""A server with more requests than SGLang counts on still starts: FlashInfer's workspace."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_mamba_mtp.compat import attention

NEMOTRON_NANO = {"heads": 40, "kv_heads": 8, "head_dim": 128}


def test_what_flashinfer_asked_for_on_a_gpu():
    """163 drafts of 4 tokens of Nemotron-Nano-9B-v2 on an H200: 'batch_prefill_tmp_v with size 492830720' was more than
    there was; its sums come on top."""
    asked = 492_830_720
    assert attention.verify_workspace(requests=163, nodes=4, **NEMOTRON_NANO) == asked + asked // 128
    assert attention.verify_workspace(requests=242, nodes=4, heads=8, kv_heads=1, head_dim=256) < 384 * 2**20


@pytest.fixture
def server(monkeypatch):
    """Arguments and model of a server whose attention is FlashInfer's, on one rank; its workspace as SGLang has it."""
    from sglang.srt.environ import envs

    monkeypatch.setattr(attention, "attention_ranks", lambda: 1)
    monkeypatch.setattr(attention, "resolved", lambda args: args)
    monkeypatch.delenv(attention.WORKSPACE, raising=False)
    model = SimpleNamespace(num_attention_heads=40, get_total_num_kv_heads=lambda: 8, head_dim=128)

    def size(requests: int, backend: str = "flashinfer") -> int:
        args = SimpleNamespace(attention_backend=backend, prefill_attention_backend=None, decode_attention_backend=None)
        attention.make_room_for_verifies(args, model, requests=requests, nodes=4)
        return envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()

    yield size
    os.environ.pop(attention.WORKSPACE, None)


def test_a_workspace_grows_with_the_requests(server):
    default = server(1)
    assert default == 384 * 2**20
    assert server(163) == attention.verify_workspace(requests=163, nodes=4, **NEMOTRON_NANO) > default


def test_other_attention_needs_none(server):
    assert server(500, "triton") == server(1)


def test_an_operators_workspace_stays(server, monkeypatch):
    monkeypatch.setenv(attention.WORKSPACE, str(2**20))
    assert server(500) == 2**20
