"""Parts of a convolution's channels: what a recurrence keeps lands in its window, the rest is the result."""

from __future__ import annotations

import math

import pytest
import torch
from mamba_mtp_kernels.conv1d import verify_replay
from mamba_mtp_kernels.conv1d.reference import conv1d_verify_reference
from mamba_mtp_kernels.conv1d.verify_replay import conv1d_verify

from ..helpers import assert_same_bits, chain_parents, random_tree_parents
from .case import Case

#: A number: the result's channels; a shape: a token's in a window.
LAYOUTS = {
    "as GDN": (7, (2, 3), (3, 4)),
    "as Mamba2": ((2, 4), (1, 3), 5),
    "result between": ((3,), 4, (2, 2)),
    "two parts": (4, (3,)),
    "two parts, result last": ((3,), 4),
    "more than a block": (300, (2, 128), (3, 101)),
}


def window_tensor(rows: int, capacity: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
    """[rows, capacity, *shape] of NaN within more of it: strides of rows and tokens are its own."""
    return torch.full((rows, capacity + 3, 2, *shape), float("nan"), dtype=dtype, device=device)[:, 1:-2, 1]


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("op", "programs_wanted"),
    [(conv1d_verify, 10**9), (conv1d_verify, 0), (conv1d_verify, -1), (conv1d_verify_reference, 0)],
    ids=["kernel, a node each", "kernel, shared", "kernel, shared by many", "reference"],
)
def test_each_channel_lands_in_its_part(op, layout, chain, programs_wanted, device, monkeypatch):
    """With the bits that it has without parts, in the place of its node; nothing else changes, padding writes zeros to
    the result alone."""
    monkeypatch.setattr(verify_replay, "PROGRAMS_WANTED", programs_wanted)
    monkeypatch.setattr(verify_replay, "PROGRAMS_AT_ONCE", programs_wanted)
    shapes, nodes = LAYOUTS[layout], 5
    widths = [part if isinstance(part, int) else math.prod(part) for part in shapes]
    parents = chain_parents(5, nodes) if chain else random_tree_parents(5, nodes, torch.Generator().manual_seed(3))
    case = Case(parents, dim=sum(widths), dtype=torch.bfloat16, slots=[4, 0, 5, -1, 2], pending=[0, 0, 1, 3, 3])
    case.chain = chain
    capacity = case.order.shape[1]
    parts = [
        part if isinstance(part, int) else window_tensor(len(case.order), capacity, part, torch.bfloat16, device)
        for part in shapes
    ]
    whole, _ = case.run(op, device)
    y, inputs = case.run(op, device, parts=parts)
    assert_same_bits("inputs", inputs, case.expected_inputs())
    live = (case.slots > 0).nonzero()[:, 0]
    row = case.rows[live][:, None]
    position = case.order[row, case.pending[case.slots[live]][:, None] + torch.arange(nodes)].long()
    for part, expected in zip(parts, whole.split(widths, dim=-1), strict=True):
        if isinstance(part, int):
            assert_same_bits("y", y, expected)
            continue
        kept = torch.full_like(part, float("nan"), device="cpu")
        kept[row, position] = expected.unflatten(0, (5, nodes))[live].unflatten(-1, part.shape[2:])
        assert_same_bits("kept", part.cpu(), kept)
        base = part._base
        assert base is not None
        assert int((~base.isnan()).sum()) == int((~part.isnan()).sum()), "written beside the tensor"


@pytest.mark.parametrize("op", [conv1d_verify, conv1d_verify_reference], ids=["kernel", "reference"])
def test_errors_name_the_parts(op, device):
    case = Case(chain_parents(1, 3))
    rows, capacity = case.order.shape
    kept = window_tensor(rows, capacity, (2, 2), torch.float32, device)
    for parts, message in (
        ([4, 6], "parts: 2 numbers of channels and 0 tensors, expected one number and at most 2 tensors"),
        ([kept, kept], "parts: 0 numbers of channels and 2 tensors"),
        ([1, kept, kept, kept], "parts: 1 numbers of channels and 3 tensors"),
        ([7, kept], r"parts: 7 \+ 4 channels, expected 10"),
        ([6, kept[:, 1:]], r"parts\[0\]: shape .*, expected \[R=2, C=9, _, _\]"),
        ([6, kept[..., :1].expand(-1, -1, -1, 2)], r"parts\[0\]: "),
    ):
        with pytest.raises(ValueError, match=message):
            case.run(op, device, parts=parts)
    with pytest.raises(TypeError, match=r"parts\[0\]: dtype"):
        case.run(op, device, parts=[6, kept.double()])
