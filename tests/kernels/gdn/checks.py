"""What every GDN verify is held to, whoever computed it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mamba_mtp_kernels.gdn.reference import gdn_fold_reference, gdn_verify_reference

from ..helpers import assert_close, assert_same_bits, rms_ratio
from .case import WINDOWS, Case

# relative, for float32 throughout: a few units in the last place of a sum over the window
FLOAT32_LIMIT = 4e-6


def limit_for(expected: torch.Tensor, dtype: torch.dtype, *, on_gpu: bool) -> float:
    """Twice what rounding the exact result to dtype costs (stock's own error), or the float32 limit.

    Triton's interpreter truncates to bf16 where hardware rounds, of the folded state and of the output both: 5 times.
    """
    return FLOAT32_LIMIT + (2.0 if on_gpu else 5.0) * rms_ratio(expected.to(dtype), expected)


def storage_of(x: torch.Tensor) -> torch.Tensor:
    """Every element behind x, gaps included, on the CPU."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).cpu()


def positions_in_storage(x: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Flat storage indices of x[index], x's leading axes indexed by CPU tensors."""
    ids = torch.arange(x.untyped_storage().nbytes() // x.element_size()).as_strided(
        x.shape, x.stride(), x.storage_offset()
    )
    return ids[index].reshape(-1)


def check_verify(case: Case, verify: Callable[..., torch.Tensor], **extra: object) -> torch.Tensor:
    """Run verify on the case: outputs, window entries and folded states against float64, all else bit for bit."""
    on_gpu = case.tensors["q"].is_cuda
    expected, after = case.oracle()
    before = case.clone()
    out = case.run(verify, **extra)
    live, tokens = case.live(), case.live_tokens()
    dtype = case.tensors["q"].dtype
    state_dtype = case.tensors["checkpoint"].dtype

    assert out.shape == case.tensors["v"].shape and out.dtype == dtype
    padding = torch.ones(out.shape[0], dtype=torch.bool)
    padding[tokens] = False
    assert not out.cpu()[padding].any(), "padding rows must come out as zeros"
    want, got = expected.cpu()[tokens], out.cpu()[tokens]
    coarse = max((dtype, state_dtype), key=lambda kind: torch.finfo(kind).eps)
    assert_close("o", got, want, limit_for(want, coarse if not on_gpu else dtype, on_gpu=on_gpu))

    rows, positions = case.node_positions()
    for name in WINDOWS:
        got, want = case.tensors[name].cpu()[rows, positions], after.tensors[name].cpu()[rows, positions]
        if name in ("window_k", "window_v"):
            assert_same_bits(name, got, want.to(got.dtype))
        else:
            # minus 2: SGLang's log(1 + e^x) is right to 6e-8 of 1, not of a tiny g (nor is a beta of 1 to be 0)
            assert_close(name, got - 2, want - 2, 1e-6)
        rest = torch.ones(storage_of(case.tensors[name]).shape, dtype=torch.bool)
        rest[positions_in_storage(case.tensors[name], (rows, positions))] = False
        assert_same_bits(
            f"{name}, entries that are no node's",
            storage_of(case.tensors[name])[rest],
            storage_of(before.tensors[name])[rest],
        )

    folded = case.folding_slots()
    pool, old = case.tensors["checkpoint"], before.tensors["checkpoint"]
    if folded.numel():
        want = after.tensors["checkpoint"].cpu()[folded]
        # both sides round to the state's dtype: what is left is values next to a rounding boundary
        slack = 0.0 if state_dtype == torch.float32 else (0.5 if on_gpu else 2.5) * torch.finfo(state_dtype).eps
        assert_close("folded state", pool.cpu()[folded], want, FLOAT32_LIMIT + slack)
    rest = torch.ones(storage_of(pool).shape, dtype=torch.bool)
    rest[positions_in_storage(pool, (folded,))] = False
    assert_same_bits("checkpoint, slots that do not fold", storage_of(pool)[rest], storage_of(old)[rest])
    case.books.assert_same(before.books)
    assert live.numel() == 0 or torch.isfinite(got).all()
    return out


def implementation(name: str, device: torch.device) -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
    """(verify, fold) of "triton" (interpreted where there is no GPU) or "reference"."""
    if name == "reference":
        return gdn_verify_reference, gdn_fold_reference
    from mamba_mtp_kernels.gdn.fold import gdn_fold
    from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

    return gdn_verify, gdn_fold
