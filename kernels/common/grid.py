"""Grids of launches: what CUDA allows, said before it fails in a capture."""

from __future__ import annotations

LIMITS = (2**31 - 1, 65_535, 65_535)


def launch_grid(*axes: int) -> tuple[int, ...]:
    """`axes`, programs along each. The axis that grows with the batch goes first: it alone may be long.

    Raises ValueError where CUDA would refuse one.
    """
    for axis, (programs, limit) in enumerate(zip(axes, LIMITS, strict=False)):
        if programs > limit:
            raise ValueError(f"a launch of {axes} programs: axis {axis} has at most {limit}")
    return axes
