"""Mamba2 ops on CPU against the per-token float64 recurrence."""

from __future__ import annotations

import pytest
import torch

from sglang_mamba_mtp.cpu import mamba2_ops

from . import oracles
from .test_gdn_ops import TREES

NHEADS, HEADDIM, NGROUPS, DSTATE = 6, 10, 2, 12
CHUNK = 16


class Problem:
    def __init__(self, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32):
        gen = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen)

        self.x, self.dt = rand(tokens, NHEADS, HEADDIM), rand(tokens, NHEADS)
        self.B, self.C = rand(tokens, NGROUPS, DSTATE), rand(tokens, NGROUPS, DSTATE)
        self.A, self.D, self.dt_bias = -rand(NHEADS).exp() * 0.3, rand(NHEADS), rand(NHEADS) * 0.5
        self.pool = rand(9, NHEADS, HEADDIM, DSTATE).to(dtype)

    def step(self, state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        args = (self.x[t], self.dt[t], self.A, self.B[t], self.C[t], self.D, self.dt_bias)
        return oracles.mamba2_step(state, *args)

    def states(self, begin: int, end: int, state: torch.Tensor) -> list[torch.Tensor]:
        """The state before each token of [begin, end), and after the last."""
        out = [state]
        for t in range(begin, end):
            out.append(self.step(out[-1], t)[1])
        return out

    def scan(self, lens: list[int], initial: torch.Tensor | None, **kwargs: object) -> tuple[torch.Tensor, ...]:
        out = torch.full((1, *self.x.shape), float("nan"))
        bounds = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()])
        result = mamba2_ops.mamba_chunk_scan_combined(
            self.x[None],
            self.dt[None],
            self.A,
            self.B[None],
            self.C[None],
            chunk_size=CHUNK,
            D=self.D,
            dt_bias=self.dt_bias,
            initial_states=initial,
            cu_seqlens=bounds,
            dt_softplus=True,
            out=out,
            return_varlen_states=True,
            state_dtype=torch.float32,
            **kwargs,
        )
        return out, *result

    def update(self, slots: torch.Tensor, n: int | None, out: torch.Tensor, **kwargs: object) -> None:
        """selective_state_update with the expanded arguments MambaMixer2 passes; n None is a decode step."""
        shape = (len(slots),) if n is None else (len(slots), n)
        mamba2_ops.selective_state_update(
            self.pool,
            self.x.view(*shape, NHEADS, HEADDIM),
            self.dt[..., None].expand(-1, -1, HEADDIM).view(*shape, NHEADS, HEADDIM),
            self.A[:, None, None].expand(-1, HEADDIM, DSTATE),
            self.B.view(*shape, NGROUPS, DSTATE),
            self.C.view(*shape, NGROUPS, DSTATE),
            self.D[:, None].expand(-1, HEADDIM),
            dt_bias=self.dt_bias[:, None].expand(-1, HEADDIM),
            dt_softplus=True,
            state_batch_indices=slots,
            out=out,
            **kwargs,
        )


@pytest.mark.parametrize("lens", [[1], [15], [16], [17], [5, 16, 33, 1], [50, 3]])
@pytest.mark.parametrize("prefix", [False, True])
def test_chunked_prefill_equals_the_recurrence(lens: list[int], prefix: bool):
    p = Problem(sum(lens), seed=sum(lens))
    initial = p.pool[: len(lens)].clone() if prefix else None
    out, states, final = p.scan(lens, initial, return_intermediate_states=True)
    begin, offset = 0, 0
    for i, length in enumerate(lens):
        first = (initial[i] if initial is not None else torch.zeros_like(p.pool[0])).double()
        after = p.states(begin, begin + length, first)
        want = torch.stack([p.step(after[t], begin + t)[0] for t in range(length)])
        assert oracles.relative(out[0, begin : begin + length], want) < 2e-6
        assert oracles.relative(final[i], after[-1]) < 2e-6
        for c in range(1, length // CHUNK + 1):  # 0.5.17 reads sequence i's snapshots at offset_i + c
            assert oracles.relative(states[0, offset + c], after[c * CHUNK]) < 2e-6
        begin, offset = begin + length, offset + length // CHUNK


@pytest.mark.parametrize("lens", [[33], [5, 16, 33, 1], [50, 30]])
def test_tracked_states_of_0_5_23(lens: list[int]):
    p = Problem(sum(lens), seed=1)
    initial = p.pool[: len(lens)].clone()
    bounds = [0, *torch.tensor(lens).cumsum(0).tolist()]
    wanted = [(i, bounds[i] + CHUNK) for i, n in enumerate(lens) if n > CHUNK]
    seq, end = (torch.tensor(column) for column in zip(*wanted, strict=True))
    _, grid, final, tracked = p.scan(lens, initial, return_track_states=True, track_seq_idx=seq, track_end_locs=end)
    assert grid.shape[1] == -(-sum(lens) // CHUNK)
    for i, length in enumerate(lens):
        after = p.states(bounds[i], bounds[i] + length, initial[i].double())
        assert oracles.relative(final[i], after[-1]) < 2e-6
        for t in range(bounds[i], bounds[i] + length):
            if t % CHUNK == 0:
                assert oracles.relative(grid[0, t // CHUNK], after[t - bounds[i]]) < 2e-6
        for j, (owner, stop) in enumerate(wanted):
            if owner == i:
                assert oracles.relative(tracked[0, j], after[stop - bounds[i]]) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode(dtype: torch.dtype):
    p = Problem(4, dtype=dtype)
    before = p.pool.clone()
    slots = torch.tensor([3, -1, 8, 1], dtype=torch.int32)
    out = torch.full((4, NHEADS, HEADDIM), float("nan"))
    p.update(slots, None, out)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert not out[i].any()
            continue
        want, state = p.step(before[slot].double(), i)
        assert oracles.relative(out[i], want) < 2e-6
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
    slots, rows = torch.tensor([6, 2][:bs]), torch.tensor([1, 0][:bs])
    buffer = torch.full((3, n + 1, NHEADS, HEADDIM, DSTATE), float("nan"), dtype=dtype)
    out = torch.full((bs, n, NHEADS, HEADDIM), float("nan"))
    p.update(
        slots,
        n,
        out,
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        cache_steps=n,
        retrieve_parent_token=torch.tensor(trees),
        intermediate_state_indices=rows,
    )
    assert torch.equal(p.pool, before)
    for b, parents in enumerate(trees):
        for node in range(n):
            state = before[int(slots[b])].double()
            for t in oracles.path_to(node, parents):
                want, state = p.step(state, b * n + t)
            assert oracles.relative(out[b, node], want) < 2e-6
            bound = 2e-6 if dtype is torch.float32 else 4e-3
            assert oracles.relative(buffer[int(rows[b]), node], state) < bound
    assert buffer[:, n].isnan().all()
