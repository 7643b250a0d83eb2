"""GDN ops on CPU against the per-token float64 recurrence."""

from __future__ import annotations

import pytest
import torch

from sglang_mamba_mtp.cpu import gdn_ops

from . import oracles

H, HV, K, V = 2, 6, 20, 12
TREES = {
    "chain": [-1, 0, 1, 2, 3],
    "star": [-1, 0, 0, 0, 0],
    "mixed": [-1, 0, 0, 1, 2],
    "deep": [-1, 0, 1, 1, 3],
    "root": [-1],
}


class Problem:
    """Unit-scale inputs for `tokens` packed tokens and a pool of 9 slots."""

    def __init__(self, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32):
        gen = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen)

        self.q, self.k, self.v = rand(1, tokens, H, K), rand(1, tokens, H, K), rand(1, tokens, HV, V)
        self.a, self.b = rand(tokens, HV), rand(tokens, HV)
        self.A_log, self.dt_bias = rand(HV) * 0.5 - 1.0, rand(HV) * 0.5
        self.pool = rand(9, HV, V, K).to(dtype)
        self.g, self.beta = oracles.gdn_gates(self.A_log, self.a, self.b, self.dt_bias)

    def step(self, state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        return oracles.gdn_step(state, self.q[0, t], self.k[0, t], self.v[0, t], self.g[t], self.beta[t])


def test_gating_is_float32_and_batched():
    p = Problem(7)
    g, beta = gdn_ops.fused_gdn_gating_cpu(p.A_log, p.a, p.b, p.dt_bias)
    assert g.shape == beta.shape == (1, 7, HV)
    assert g.dtype == beta.dtype == torch.float32
    torch.testing.assert_close(g[0].double(), p.g, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(beta[0].double(), p.beta, rtol=1e-5, atol=1e-6)


def test_gated_rmsnorm():
    x, gate, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    want = want * gate.double() * gate.double().sigmoid()
    got = gdn_ops.fused_rmsnorm_gated_cpu(x, weight, gate, 1e-6)
    assert oracles.relative(got, want) < 1e-6
    assert gdn_ops.fused_rmsnorm_gated_cpu(x.bfloat16(), weight, gate, 1e-6).dtype == torch.bfloat16


@pytest.mark.parametrize("lens", [[1], [63], [64], [65], [5, 64, 130, 1], [200, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_prefill_equals_the_recurrence(lens: list[int], dtype: torch.dtype):
    p = Problem(sum(lens), seed=sum(lens), dtype=dtype)
    before = p.pool.clone()
    slots = torch.tensor([7, 2, 5, 4][: len(lens)], dtype=torch.int32)
    bounds = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    o, last, h = gdn_ops.chunk_gated_delta_rule_cpu(
        q=p.q,
        k=p.k,
        v=p.v,
        g=p.g.float().unsqueeze(0),
        beta=p.beta.float().unsqueeze(0),
        initial_state=p.pool,
        cu_seqlens=bounds,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=slots,
    )
    assert last is None
    want, starts = torch.empty(sum(lens), HV, V, dtype=torch.float64), []
    for i, slot in enumerate(slots.tolist()):
        state = before[slot].double()
        for t in range(int(bounds[i]), int(bounds[i + 1])):
            if (t - int(bounds[i])) % gdn_ops.CHUNK == 0:
                starts.append(state)
            want[t], state = p.step(state, t)
        bound = 2e-6 if dtype is torch.float32 else 4e-3
        assert oracles.relative(p.pool[slot], state) < bound
    assert oracles.relative(o[0], want) < 2e-6
    assert h.shape == (1, len(starts), HV, V, K)
    assert oracles.relative(h[0], torch.stack(starts)) < 2e-6
    untouched = [s for s in range(9) if s not in slots.tolist()]
    assert torch.equal(p.pool[untouched], before[untouched])


def test_prefill_of_padding_leaves_the_pool_alone():
    p = Problem(10)
    before = p.pool.clone()
    args = (p.q, p.k, p.v, p.g.float()[None], p.beta.float()[None], p.pool)
    gdn_ops.chunk_gated_delta_rule_cpu(*args, torch.tensor([0, 10]), initial_state_indices=torch.tensor([-1]))
    assert torch.equal(p.pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(dtype: torch.dtype):
    p = Problem(4, dtype=dtype)
    before = p.pool.clone()
    slots = torch.tensor([3, -1, 8, 1], dtype=torch.int32)
    out = gdn_ops.fused_sigmoid_gating_delta_rule_update_cpu(
        p.A_log, p.dt_bias, p.q, p.k, p.v, p.a, p.b, p.pool, slots, torch.arange(5)
    )
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert not out[0, i].any()
            continue
        want, state = p.step(before[slot].double(), i)
        assert oracles.relative(out[0, i], want) < 2e-6
        assert oracles.relative(p.pool[slot], state) < (2e-6 if dtype is torch.float32 else 4e-3)
    untouched = [s for s in range(9) if s not in slots.tolist()]
    assert torch.equal(p.pool[untouched], before[untouched])


@pytest.mark.parametrize("names", [["mixed", "star"], ["deep", "chain"], ["root"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_leaves_every_node_state_in_the_buffer(names: list[str], dtype: torch.dtype):
    trees = [TREES[name] for name in names]
    bs, n = len(trees), len(trees[0])
    p = Problem(bs * n, seed=n, dtype=dtype)
    before = p.pool.clone()
    slots = torch.tensor([6, 2][:bs], dtype=torch.int32)
    rows = torch.tensor([1, 0][:bs], dtype=torch.int32)
    buffer = torch.full((3, n + 1, HV, V, K), float("nan"), dtype=dtype)
    out = gdn_ops.fused_sigmoid_gating_delta_rule_update_cpu(
        p.A_log,
        p.dt_bias,
        p.q,
        p.k,
        p.v,
        p.a,
        p.b,
        p.pool,
        slots,
        torch.arange(0, bs * n + 1, n),
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=rows,
        cache_steps=n,
        retrieve_parent_token=torch.tensor(trees),
    )
    assert torch.equal(p.pool, before)
    for b, parents in enumerate(trees):
        for node in range(n):
            state = before[int(slots[b])].double()
            for t in oracles.path_to(node, parents):
                want, state = p.step(state, b * n + t)
            assert oracles.relative(out[0, b * n + node], want) < 2e-6
            bound = 2e-6 if dtype is torch.float32 else 4e-3
            assert oracles.relative(buffer[int(rows[b]), node], state) < bound
    assert buffer[:, n].isnan().all()
    assert buffer[[r for r in range(3) if r not in rows.tolist()]].isnan().all()


def test_chain_without_links_equals_the_chain_tree():
    n = 5
    p = Problem(2 * n)
    args = (p.A_log, p.dt_bias, p.q, p.k, p.v, p.a, p.b, p.pool, torch.tensor([1, 2]), torch.arange(0, 2 * n + 1, n))
    chain = gdn_ops.fused_sigmoid_gating_delta_rule_update_cpu(*args, disable_state_update=True)
    tree = gdn_ops.fused_sigmoid_gating_delta_rule_update_cpu(
        *args, disable_state_update=True, retrieve_parent_token=torch.tensor([TREES["chain"]] * 2)
    )
    assert torch.equal(chain, tree)


def test_uneven_verify_is_refused():
    p = Problem(5)
    with pytest.raises(ValueError, match="5 tokens for 2 requests"):
        gdn_ops.fused_sigmoid_gating_delta_rule_update_cpu(
            p.A_log, p.dt_bias, p.q, p.k, p.v, p.a, p.b, p.pool, torch.tensor([1, 2]), torch.tensor([0, 2, 5])
        )
