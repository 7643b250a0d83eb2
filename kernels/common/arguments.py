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
        """The sizes of these letters, which blanks separate. Raises ValueError for one that no argument had."""
        missing = [letter for letter in letters.split() if letter not in self]
        if missing:
            raise ValueError(f"no argument says what the size {missing[0]} is: one that has it must not be None")
        return tuple(self[letter] for letter in letters.split())


class _Size(NamedTuple):
    """One word of Arg.sizes: the product of `letters` and `number`, less `minus`; a lower bound if `at_least`. `binds`:
    it is a letter and no more, and may be bound here. `free`: any size does."""

    text: str
    letters: tuple[str, ...]
    number: int
    minus: int
    at_least: bool
    binds: bool
    free: bool

    def known(self, sizes: Mapping[str, int]) -> int | None:
        """The size wanted; None where a letter has no value yet."""
        value = self.number
        for letter in self.letters:
            if letter not in sizes:
                return None
            value *= sizes[letter]
        return value - self.minus


@cache
def _parse(sizes: str) -> tuple[bool, tuple[_Size, ...]]:
    """Whether the sizes begin with "...", and the others."""
    words = sizes.split()
    leading = words[:1] == ["..."]
    parsed = []
    for word in words[leading:]:
        product, _, minus = word.removeprefix(">=").partition("-")
        factors = product.split("*")
        letters = tuple(factor for factor in factors if not factor.isdigit())
        number = math.prod(int(factor) for factor in factors if factor.isdigit())
        parsed.append(_Size(word, letters, number, int(minus or 0), word[0] == ">", letters == (word,), word == "_"))
    return leading, tuple(parsed)


def _fits(name: str, wanted: tuple[_Size, ...], shape: tuple[int, ...], sizes: Sizes, bound: list[str]) -> bool:
    """Whether the dimensions have the sizes wanted. What is met first goes to sizes, its letter to bound."""
    for size, actual in zip(wanted, shape, strict=True):
        if size.free:
            continue
        known = sizes.get(size.text) if size.binds else size.known(sizes)
        if known is None:
            if not size.binds:
                raise ValueError(f"{name}: expected a size {size.text}, but no argument before it says what that is")
            sizes[size.text] = actual
            bound.append(size.text)
        elif actual != known and not (size.at_least and actual > known):
            return False
    return True


def _expected(leading: tuple[object, ...], wanted: tuple[_Size, ...], sizes: Mapping[str, int]) -> str:
    """[B=2, N=4, H=?] with the sizes known."""
    words = [str(size) for size in leading]
    for size in wanted:
        if not size.letters or size.free:
            words.append(size.text)
        else:
            known = size.known(sizes)
            sign = ">=" if size.at_least else "="
            words.append(f"{size.text.removeprefix('>=')}{sign}{'?' if known is None else known}")
    return f"[{', '.join(words)}]"


def _check_contiguous(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Raise ValueError unless the last `dims` dimensions are laid out without gaps, row-major."""
    shape, strides, expected = tensor.shape, tensor.stride(), 1
    for axis in range(len(shape) - 1, len(shape) - 1 - dims, -1):
        if shape[axis] != 1 and strides[axis] != expected:
            raise ValueError(f"{name}: strides {strides} for shape {tuple(shape)}, last {dims} must be contiguous")
        expected *= shape[axis]


def check(known: Mapping[str, int] | None = None, /, **args: Arg) -> Sizes:
    """Check the arguments in their order; returns the sizes of all letters, those `known` before among them.

    Raises ValueError on a shape, stride or device other than asked for and TypeError on such a dtype.
    """
    sizes = Sizes(known or {})
    leading: tuple[int, ...] | None = None
    device: torch.device | None = None
    for name, (tensor, words, dtypes, contiguous) in args.items():
        if tensor is None:
            continue
        any_leading, wanted = _parse(words)
        shape: tuple[int, ...] = tuple(tensor.shape)
        bound: list[str] = []
        before = len(shape) - len(wanted)
        fits = before == 0 if not any_leading else before >= 0 and (leading is None or leading == shape[:before])
        if not (fits and _fits(name, wanted, shape[before:], sizes, bound)):
            for letter in bound:
                del sizes[letter]
            first = () if not any_leading else ("...",) if leading is None else leading
            raise ValueError(f"{name}: shape {shape}, expected {_expected(first, wanted, sizes)}")
        if any_leading:
            leading = shape[:before]
        if dtypes is not None and (tensor.dtype not in dtypes if isinstance(dtypes, tuple) else tensor.dtype != dtypes):
            raise TypeError(f"{name}: dtype {tensor.dtype}, expected {dtypes}")
        if contiguous and not tensor.is_contiguous():
            _check_contiguous(name, tensor, contiguous)
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"tensors on several devices: {name} on {tensor.device}, those before it on {device}")
    return sizes
