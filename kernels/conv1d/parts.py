"""Where a verify's outputs go: channels of y lie in parts, and those that a recurrence keeps go to its window.

Of [q | k | v] GDN keeps k and v until they are folded, of [x | B | C] Mamba2 keeps x and B. Written by the one who
makes them they are written once, and the verify that follows finds nodes where pending tokens are. No triton in this
file: kernels find their part with place.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..common.arguments import Arg, check

#: One is the result's, the others the window's: at most as many as a recurrence has inputs of a convolution.
MOST_PARTS = 3

#: A part: so many channels of the result, or a tensor of the window.
Part = int | torch.Tensor


class Parts(NamedTuple):
    """Parts of y's channels as the kernel takes them.

    widths      channels of each part, in order; 0: there is none.
    result      which of them is the result's.
    kept        the others: [R, C, ...] tensors of a window, a token's contiguous; None: there is none.
    """

    widths: tuple[int, int, int]
    result: int
    kept: tuple[torch.Tensor | None, torch.Tensor | None]

    @property
    def result_width(self) -> int:
        return self.widths[self.result]

    def programs(self, block: int) -> int:
        """Of `block` channels each, none in two parts."""
        return sum(-(-width // block) for width in self.widths)

    def strides(self) -> tuple[int, ...]:
        """Of rows and of tokens, of both kept ones."""
        return tuple(0 if kept is None else kept.stride(axis) for kept in self.kept for axis in range(2))


def parts_of(parts: Sequence[Part] | None, dim: int, dtype: torch.dtype, window_order: torch.Tensor) -> Parts:
    """Check the parts of `dim` channels of y; None: all are the result's. Raises ValueError or TypeError."""
    given = [dim] if parts is None else list(parts)
    numbers = [index for index, part in enumerate(given) if isinstance(part, int)]
    kept = [part for part in given if isinstance(part, torch.Tensor)]
    if len(numbers) != 1 or len(given) > MOST_PARTS:
        raise ValueError(
            f"parts: {len(numbers)} numbers of channels and {len(kept)} tensors, expected one number and at most "
            f"{MOST_PARTS - 1} tensors"
        )
    for index, tensor in enumerate(kept):
        sizes = "R C " + "_ " * (tensor.dim() - 2)
        check(order=Arg(window_order, "R C"), **{f"parts[{index}]": Arg(tensor, sizes, dtype, tensor.dim() - 2)})
    widths = [part if isinstance(part, int) else part[0, 0].numel() for part in given]
    if sum(widths) != dim:
        raise ValueError(f"parts: {' + '.join(map(str, widths))} channels, expected {dim}")
    widths += [0] * (MOST_PARTS - len(widths))
    first, second, *_ = [*kept, None, None]
    return Parts((widths[0], widths[1], widths[2]), numbers[0], (first, second))
