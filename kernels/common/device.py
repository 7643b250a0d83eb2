"""What a device is. No triton in this file."""

from __future__ import annotations

import functools

import torch


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """An NVIDIA GPU's, such as (9, 0); (0, 0) of any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)
