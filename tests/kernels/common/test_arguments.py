"""The checker of the launchers' tensors: what it binds, and what its errors say."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.arguments import FLOATS, INDICES, Arg, check


def test_letters_bind_at_first_sight():
    sizes = check(
        slots=Arg(torch.zeros(3, dtype=torch.int32), "B", INDICES),
        ancestors=Arg(torch.zeros(5, 4, dtype=torch.int64), ">=B N", torch.int64),
        x=Arg(torch.zeros(12, 2, 16), "B*N H P", FLOATS, contiguous=3),
        conv=Arg(torch.zeros(2, 3), "H N-1"),
        pair=Arg(torch.zeros(2, 7), "2 _"),
        bias=Arg(None, "nobody knows this"),
    )
    assert sizes == {"B": 3, "N": 4, "H": 2, "P": 16}
    assert sizes.get_all("P B") == (16, 3)


def test_known_sizes_are_checked_and_returned():
    assert check({"B": 2}, x=Arg(torch.zeros(2, 3), "B D")) == {"B": 2, "D": 3}
    with pytest.raises(ValueError, match=r"x: shape \(2, 3\), expected \[B=4, D=\?\]"):
        check({"B": 4}, x=Arg(torch.zeros(2, 3), "B D"))


@pytest.mark.parametrize(
    ("shape", "sizes", "expected"),
    [
        ((3, 5), "B N", r"\[B=3, N=4\]"),
        ((3,), "B N", r"\[B=3, N=4\]"),
        ((3, 4, 1), "B N", r"\[B=3, N=4\]"),
        ((2, 4), ">=B N", r"\[B>=3, N=4\]"),
        ((11, 2), "B*N H", r"\[B\*N=12, H=\?\]"),
        ((4,), "N-1", r"\[N-1=3\]"),
        ((3,), "2", r"\[2\]"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(shape, sizes, expected):
    with pytest.raises(ValueError, match=rf"x: shape \({', '.join(map(str, shape))},?\), expected {expected}"):
        check({"B": 3, "N": 4}, x=Arg(torch.zeros(shape), sizes))


def test_one_letter_twice_in_an_argument():
    check(x=Arg(torch.zeros(3, 3), "D D"))
    with pytest.raises(ValueError, match=r"x: shape \(3, 4\)"):
        check(x=Arg(torch.zeros(3, 4), "D D"))


def test_a_bound_of_an_unknown_size_is_the_callers_fault():
    with pytest.raises(ValueError, match="x: expected a size >=B, but no argument before it says what that is"):
        check(x=Arg(torch.zeros(3), ">=B"))


def test_leading_dimensions_are_the_same_in_all():
    one, layers = torch.zeros(5, 2), torch.zeros(4, 5, 3)
    check(a=Arg(one, "... R H"), b=Arg(torch.zeros(5, 3), "... R D"))
    check(a=Arg(torch.zeros(4, 5, 2), "... R H"), b=Arg(layers, "... R D"))
    with pytest.raises(ValueError, match=r"b: shape \(4, 5, 3\), expected \[R=5, D=\?\]"):
        check(a=Arg(one, "... R H"), b=Arg(layers, "... R D"))
    with pytest.raises(ValueError, match=r"a: shape \(5, 2\), expected \[4, R=5, H=\?\]"):
        check(b=Arg(layers, "... R D"), a=Arg(one, "... R H"))


def test_dtype():
    check(x=Arg(torch.zeros(2, dtype=torch.int64), "B", INDICES))
    with pytest.raises(TypeError, match=r"x: dtype torch\.float32, expected torch\.int32"):
        check(x=Arg(torch.zeros(2), "B", torch.int32))
    with pytest.raises(TypeError, match=r"x: dtype torch\.float64, expected \(torch\.float32"):
        check(x=Arg(torch.zeros(2, dtype=torch.float64), "B", FLOATS))


def test_contiguity():
    wide = torch.zeros(4, 6)
    check(x=Arg(wide[:, :3], "A B"), y=Arg(wide.T, "_ _", contiguous=0), z=Arg(wide[:1, :3], "_ _", contiguous=2))
    with pytest.raises(ValueError, match=r"x: strides \(6, 1\) for shape \(4, 3\), last 2 must be contiguous"):
        check(x=Arg(wide[:, :3], "A B", contiguous=2))
    with pytest.raises(ValueError, match=r"x: strides \(1, 6\)"):
        check(x=Arg(wide.T, "A B"))


def test_one_device():
    with pytest.raises(ValueError, match="several devices: y on meta, those before it on cpu"):
        check(x=Arg(torch.zeros(2), "A"), none=Arg(None, "A"), y=Arg(torch.zeros(2, device="meta"), "A"))
