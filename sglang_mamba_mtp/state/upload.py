"""Lists of the host on the device, without waiting for what is at work there."""

from __future__ import annotations

from typing import Any

import torch


def upload(values: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` (nested lists of numbers) as a tensor of ``dtype`` on ``device``, copied in the order of the stream.

    From pinned memory: a list that is an index, or memory that is not pinned, makes the host wait for the stream.
    """
    device = torch.device(device)
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
