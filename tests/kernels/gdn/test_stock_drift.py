"""State error after 4,096 chained commits against SGLang's own decode kernel: needs a GPU and sglang's kernels."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.reference import commit_window_reference

from ..helpers import rms_ratio
from .case import Case, make_case
from .test_steps import settle

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COMMITS = 4096


def exact_step(state: torch.Tensor, case: Case, tokens: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """States [B, HV, V, K] float64 after one token a row, where `on`."""
    x = {name: case.tensors[name][tokens].double() for name in ("k", "v", "a", "b")}
    k = x["k"] / torch.sqrt((x["k"] ** 2).sum(-1, keepdim=True) + 1e-6)
    k = k.repeat_interleave(state.shape[1] // k.shape[1], 1)
    gate = torch.nn.functional.softplus(x["a"] + case.tensors["dt_bias"].double())
    new = state * (-case.tensors["A_log"].double().exp() * gate).exp()[..., None, None]
    delta = x["b"].sigmoid()[..., None] * (x["v"] - torch.einsum("bhvk,bhk->bhv", new, k))
    return torch.where(on[:, None, None, None], new + delta[..., None] * k[..., None, :], state)


@pytest.mark.parametrize("shape", [{"H": 1, "HV": 1, "K": 16, "V": 16}, {"H": 2, "HV": 4, "K": 128, "V": 128}], ids=str)
def test_drift_is_no_larger_than_stock_decodes(shape: dict[str, int]) -> None:
    """Random accept lengths 1 to 4, weak decay: accepted tokens through our windows, and one by one through stock."""
    stock = pytest.importorskip("sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent")
    from mamba_mtp_kernels.gdn.fold import gdn_fold
    from mamba_mtp_kernels.gdn.verify import gdn_verify

    batch, nodes = 4, 4
    generator = torch.Generator("cuda").manual_seed(0)
    case = make_case(
        batch=batch, nodes=nodes, dtype=torch.bfloat16, pending=[0] * batch, fold_threshold=8, gate_shift=-6.0,
        device="cuda", **shape,
    )  # fmt: skip
    books, slots = case.books, case.books.slots.long()
    theirs = case.tensors["checkpoint"].clone()
    exact = theirs[slots].double()
    count = torch.zeros(batch, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    for _ in range(COMMITS):
        for name, shift in (("q", 0.0), ("k", 0.0), ("v", 0.0), ("a", -6.0), ("b", 0.0)):
            like = case.tensors[name]
            fresh = torch.randn(like.shape, generator=generator, device="cuda") + shift
            # gates in float32: stock rounds beta to the gates' dtype in one of its kernels
            case.tensors[name] = fresh if name in ("a", "b") else fresh.bfloat16()
        case.run(gdn_verify)
        last = torch.randint(0, nodes, (batch,), generator=generator, device="cuda")
        commit_window_reference(
            pending=books.pending, window_row=books.window_row, order=books.order, slots=books.slots, rows=books.rows,
            last_correct=last, steps_to_track=None, parents=books.parents, fold_threshold=books.fold_threshold,
            track_count=count,
        )  # fmt: skip
        for node in range(nodes):
            on, tokens = last >= node, torch.arange(batch, device="cuda") * nodes + node
            q, k, v, a, b = (case.tensors[name][tokens] for name in ("q", "k", "v", "a", "b"))
            stock.fused_sigmoid_gating_delta_rule_update(
                A_log=case.tensors["A_log"], dt_bias=case.tensors["dt_bias"], q=q[None], k=k[None], v=v[None], a=a, b=b,
                initial_state_source=theirs, initial_state_indices=torch.where(on, books.slots, -1), cu_seqlens=starts,
                use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0,
            )  # fmt: skip
            exact = exact_step(exact, case, tokens, on)
    ours, plain = rms_ratio(settle(case, gdn_fold), exact), rms_ratio(theirs[slots], exact)
    assert ours <= plain, f"error {ours:.2e}, stock's {plain:.2e}"
