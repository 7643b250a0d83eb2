"""Which convolutions there are kernels for. No triton in this file."""

from __future__ import annotations

MAX_WIDTH = 4


def check_width(width: int) -> None:
    """Raise ValueError for a kernel width that is not 2, 3 or 4."""
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"weight: kernel width {width}, expected 2..{MAX_WIDTH}")


def has_silu(activation: str | None) -> bool:
    """Whether outputs go through silu. Raises ValueError for an activation other than "silu", "swish" or None."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation: {activation!r}, expected 'silu', 'swish' or None")
    return activation is not None
