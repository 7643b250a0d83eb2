"""FlashInfer's workspace, for more requests than SGLang counts on, and its plans, which wait for the device."""

from __future__ import annotations

import builtins
import inspect
import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_mamba_mtp.compat import attention
from sglang_mamba_mtp.hooks import startup

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


class Prepares:
    """A backend that says when it prepares a forward, and how."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def init_forward_metadata(self, forward_batch: object) -> None:
        self.said.append(f"{self.name}, eager")

    def init_forward_metadata_out_graph(self, forward_batch: object, in_capture: bool = False) -> None:
        self.said.append(f"{self.name}, a graph")


class PreparesOurs(Prepares):
    """The linear-attention layers'."""


def test_linear_layers_are_prepared_before_a_plan_waits(sglang, monkeypatch):
    """What is queued after FlashInfer has waited for the draft finds the GPU idle."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    said: list[str] = []
    hybrid = object.__new__(HybridLinearAttnBackend)
    hybrid.full_attn_backend, hybrid.linear_attn_backend = Prepares("full", said), PreparesOurs("linear", said)
    hybrid.attn_backend_list = [hybrid.full_attn_backend, hybrid.linear_attn_backend]

    monkeypatch.setattr(startup, "decision", lambda runner: startup.Serving(None, "gdn", "gdn", PreparesOurs))
    monkeypatch.setattr(attention, "resolved", lambda args: args)
    arguments = SimpleNamespace(**dict.fromkeys(attention._BACKENDS, "triton"))
    runner = SimpleNamespace(is_draft_worker=False, server_args=arguments)
    built = startup.build_attention_backend(lambda runner, full: hybrid, runner, hybrid.full_attn_backend)

    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    built.init_forward_metadata_out_graph(batch)
    built.init_forward_metadata(batch)
    assert said == ["linear, a graph", "full, a graph", "linear, eager", "full, eager"]


class Walked(torch.Tensor):
    """A tensor that nobody may go through element by element."""

    def __iter__(self):
        raise AssertionError("walked")


def test_flashinfer_plans_without_a_walk(monkeypatch):
    prefill = pytest.importorskip("flashinfer.prefill")
    monkeypatch.setattr(prefill, "max", builtins.max, raising=False)
    monkeypatch.setattr(attention, "resolved", lambda args: args)
    backends = dict.fromkeys(attention._BACKENDS, "triton")
    attention.plan_without_a_walk(SimpleNamespace(**backends))
    assert prefill.max is builtins.max

    attention.plan_without_a_walk(SimpleNamespace(**backends | {"attention_backend": "flashinfer"}))
    longest = inspect.unwrap(prefill.BatchPrefillWithPagedKVCacheWrapper.plan).__globals__["max"]
    lengths = torch.tensor([3, 7, 5], dtype=torch.int32)
    assert longest(lengths.as_subclass(Walked)).item() == 7
    assert longest(3, 4) == 4 and longest([1, 9, 2], key=lambda value: -value) == 1 and longest([], default=0) == 0
