"""One checker for the tensors of a launcher: sizes are letters, an error names the argument and prints what it met.

    sizes = check(
        slots=Arg(slots, "B", INDICES),
        ancestors=Arg(ancestors, ">=B N", torch.int64),
        x=Arg(x, "B*N H P", FLOATS, contiguous=2),
        bias=Arg(bias, "H", FLOATS),  # None is skipped
    )
    batch, nodes, heads = sizes.get_all("B N H")

A letter (or word) gets its value where it is met first: arguments that settle sizes stand before those that use them.
No triton in this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)

Dtypes = torch.dtype | tuple[torch.dtype, ...] | None


class Arg(NamedTuple):
    """A tensor and what it must be.

    tensor      the argument; None is skipped.
    sizes       one word a dimension, with blanks between them: "B" binds or equals the size B, "B*N" is a product and
                "K-1" one less than K, both of sizes bound before, ">=B" any size from B on, "3" is 3 and "_" any size.
                A leading "..." stands for any number of dimensions, the same ones in all arguments that have it.
    dtypes      one or several; None: any.
    contiguous  how many trailing dimensions lie without gaps, row-major; 0: any strides.
    """

    tensor: torch.Tensor | None
    sizes: str
    dtypes: Dtypes = None
    contiguous: int = 1


class Sizes(dict[str, int]):
    """The sizes bound by a check, by letter."""

    def get_all(self, letters: str) -> tuple[int, ...]:
        """The sizes of these letters, which blanks separate."""
        return tuple(self[letter] for letter in letters.split())


class _Size(NamedTuple):
    """One word of Arg.sizes: product of `letters` and `number`, less `minus`; a lower bound if `at_least`."""

    text: str
    letters: tuple[str, ...]
    number: int
    minus: int
    at_least: bool


@cache
def _parse(sizes: str) -> tuple[bool, tuple[_Size, ...]]:
    """Whether the sizes begin with "...", and the others."""
    words = sizes.split()
    leading = words[:1] == ["..."]
    parsed = []
    for word in words[leading:]:
        factors, _, minus = word.removeprefix(">=").partition("-")
        numbers = [int(factor) for factor in factors.split("*") if factor.isdigit()]
        letters = tuple(factor for factor in factors.split("*") if not factor.isdigit())
        parsed.append(_Size(word, letters, math.prod(numbers), int(minus or 0), word.startswith(">=")))
    return leading, tuple(parsed)


def _known(size: _Size, bound: Mapping[str, int]) -> int | None:
    """The size wanted; None where a letter has no value yet."""
    if any(letter not in bound for letter in size.letters):
        return None
    return math.prod((bound[letter] for letter in size.letters), start=size.number) - size.minus


def _check_shape(name: str, arg: Arg, sizes: Sizes, leading: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the shape fits; bind what is met first."""
    assert arg.tensor is not None
    any_leading, wanted = _parse(arg.sizes)
    shape = tuple(arg.tensor.shape)
    before = len(shape) - len(wanted)
    fits = before == 0 or (any_leading and before > 0)
    if fits and any_leading:
        fits = leading.setdefault("...", shape[:before]) == shape[:before]
    bound = dict(sizes)
    for size, actual in zip(wanted, shape[max(before, 0) :], strict=False):
        if not fits:
            break
        if size.text == "_":
            continue
        known = _known(size, bound)
        if known is None:
            if size.text not in size.letters:
                raise ValueError(f"{name}: expected a size {size.text}, but no argument before it says what that is")
            bound[size.text] = actual
        else:
            fits = actual >= known if size.at_least else actual == known
    if not fits:
        raise ValueError(f"{name}: shape {shape}, expected {_expected(any_leading, wanted, sizes, leading)}")
    sizes.update(bound)


def _expected(any_leading: bool, wanted: tuple[_Size, ...], sizes: Sizes, leading: dict[str, tuple[int, ...]]) -> str:
    """[B=2, N=4, H=?] with the sizes known before this argument."""
    words = [str(size) for size in leading.get("...", ("...",))] if any_leading else []
    for size in wanted:
        if not size.letters or size.text == "_":
            words.append(size.text)
        else:
            known = _known(size, sizes)
            sign = ">=" if size.at_least else "="
            words.append(f"{size.text.removeprefix('>=')}{sign}{'?' if known is None else known}")
    return f"[{', '.join(words)}]"


def _check_contiguous(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Raise ValueError unless the last `dims` dimensions are laid out without gaps, row-major."""
    expected = 1
    for axis in range(tensor.dim() - 1, tensor.dim() - 1 - dims, -1):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != expected:
            raise ValueError(
                f"{name}: strides {tensor.stride()} for shape {tuple(tensor.shape)}, last {dims} must be contiguous"
            )
        expected *= tensor.shape[axis]


def check(known: Mapping[str, int] | None = None, /, **args: Arg) -> Sizes:
    """Check the arguments in their order; returns the sizes of all letters, those `known` before among them.

    Raises ValueError on a shape, stride or device other than asked for and TypeError on such a dtype.
    """
    sizes = Sizes(known or {})
    leading: dict[str, tuple[int, ...]] = {}
    devices = {}
    for name, arg in args.items():
        tensor = arg.tensor
        if tensor is None:
            continue
        _check_shape(name, arg, sizes, leading)
        dtypes = arg.dtypes
        if dtypes is not None and (tensor.dtype not in dtypes if isinstance(dtypes, tuple) else tensor.dtype != dtypes):
            raise TypeError(f"{name}: dtype {tensor.dtype}, expected {dtypes}")
        if arg.contiguous:
            _check_contiguous(name, tensor, arg.contiguous)
        devices[name] = tensor.device
    if len(set(devices.values())) > 1:
        raise ValueError(
            "tensors on several devices: " + ", ".join(f"{name} on {device}" for name, device in devices.items())
        )
    return sizes
