"""What the GPU tests rest on: the comparison of 16-bit engines, and PyTorch in place of a kernel of SGLang's."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace

import pytest
import torch

from .cuda_ops import own_experts, split_qkvzba
from .rounding import spread, token_differences
from .scenario import Outcome
from .states import Record, State, as_prefix, name_of


def _run(tokens: list[int], *, leads: dict[int, float], scale: float = 1.0):
    """A run of one request "s/r", prompt [1, 2]; ``leads`` by number of tokens before."""
    state = State(torch.ones(2, 3, 4, 4) * scale, (torch.ones(2, 5, 3),))
    return SimpleNamespace(
        outcomes={"s/r": Outcome(prompt=[1, 2], tokens=tokens, finish="length")},
        records=[Record("decode", "r", as_prefix([1, 2, *tokens]), state)],
        gaps={name_of([1, 2, *tokens[:n]]): lead for n, lead in leads.items()},
    )


def test_spread_is_the_largest_difference_seen():
    first = _run([5, 6], leads={0: 1.0, 1: 0.5})
    others = [_run([5, 6], leads={0: 1.25, 1: 0.5}, scale=1.01), _run([5, 6], leads={0: 1.0}, scale=0.97)]
    seen = spread(first, others)
    assert seen.state == pytest.approx(0.03, rel=1e-4) and seen.lead == pytest.approx(0.25) and seen.states == 2
    assert seen.tie == pytest.approx(0.5)
    with pytest.raises(ValueError, match="nothing to compare: 0 states"):
        spread(first, [_run([7, 8], leads={})])


def test_a_difference_counts_unless_the_token_led_by_little():
    wanted = _run([5, 6, 7], leads={0: 3.0, 1: 0.125, 2: 3.0})
    assert token_differences(_run([5, 6, 7], leads={}), wanted, tie=0.25) == ([], [])
    wrong, ties = token_differences(_run([5, 9, 7], leads={}), wanted, tie=0.25)
    assert not wrong and ties == ["s/r: 9 not 6 at position 1, which led by 1.25e-01"]
    wrong, ties = token_differences(_run([5, 9, 7], leads={}), wanted, tie=0.125)
    assert wrong and not ties
    wrong, ties = token_differences(_run([5, 6], leads={}), wanted, tie=9.0)
    assert wrong == ["s/r: 2 tokens, not 3"] and not ties


@pytest.mark.parametrize(("heads_qk", "heads_v", "head_qk", "head_v"), [(2, 4, 16, 24), (3, 3, 8, 16), (2, 8, 16, 8)])
def test_split_qkvzba_is_sglangs_own(sglang_version, heads_qk, heads_v, head_qk, head_v):
    from sglang.srt.models.qwen3_next import Qwen3GatedDeltaNet

    sizes = {"num_k_heads": heads_qk, "num_v_heads": heads_v, "head_k_dim": head_qk, "head_v_dim": head_v}
    layer = SimpleNamespace(attn_tp_size=1, **sizes)
    qkvz, ba = torch.randn(5, 2 * heads_qk * head_qk + 2 * heads_v * head_v), torch.randn(5, 2 * heads_v)
    q, k, v, z, b, a = Qwen3GatedDeltaNet.fix_query_key_value_ordering(layer, qkvz, ba)
    want = (torch.cat([part.reshape(5, -1) for part in (q, k, v)], dim=-1), z, b, a)
    for got, expected in zip(split_qkvzba(qkvz, ba, heads_qk, heads_v, head_qk, head_v), want, strict=True):
        assert got.shape == expected.shape and torch.equal(got, expected)


def test_ranks_with_experts_of_their_own_add_up(sglang_version):
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    def outputs(gates_and_ups: torch.Tensor, downs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        config = SimpleNamespace(activation="silu", apply_router_weight_on_input=False)
        layer = SimpleNamespace(w13_weight=gates_and_ups, w2_weight=downs, moe_runner_config=config)
        fields = {"hidden_states": x, "topk_output": StandardTopKOutput(weights, ids, None)}
        missing = dict.fromkeys(StandardDispatchOutput._fields)
        method = own_experts(fused_moe_forward_native)
        assert list(signature(method).parameters) == list(signature(UnquantizedFusedMoEMethod.forward_cuda).parameters)
        return method(None, layer=layer, dispatch_output=StandardDispatchOutput(**missing | fields)).hidden_states

    x, weights = torch.randn(5, 8), torch.rand(5, 2)
    gates_and_ups, downs = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(5)])
    whole = outputs(gates_and_ups, downs, ids)
    first = outputs(gates_and_ups[:2], downs[:2], torch.where(ids < 2, ids, -1))
    second = outputs(gates_and_ups[2:], downs[2:], torch.where(ids >= 2, ids - 2, -1))
    torch.testing.assert_close(first + second, whole)
