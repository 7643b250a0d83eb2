"""Short convolution of draft trees.

Replay: verify_replay.py convolves, fold.py moves a slot's state on where tokens are folded; history.py finds the inputs
that both start from, words.py those of a state in SGLang's layout, four channels at a time. Slots: verify_slots.py
convolves and writes the state after every node.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch


class Conv1dOps(NamedTuple):
    """The convolution ops of one device. Signatures: verify_replay.conv1d_verify, fold.commit_conv, fold.fold_conv,
    verify_slots.conv1d_verify_slots."""

    conv1d_verify: Callable[..., torch.Tensor]
    commit_conv: Callable[..., None]
    fold_conv: Callable[..., None]
    conv1d_verify_slots: Callable[..., torch.Tensor]


def ops_for(device: torch.device | str) -> Conv1dOps:
    """Triton on a CUDA device, PyTorch on the CPU. Call once, at construction."""
    kind = torch.device(device).type
    if kind == "cuda":
        from .fold import commit_conv, fold_conv
        from .verify_replay import conv1d_verify
        from .verify_slots import conv1d_verify_slots

        return Conv1dOps(conv1d_verify, commit_conv, fold_conv, conv1d_verify_slots)
    if kind == "cpu":
        from .reference import (
            commit_conv_reference,
            conv1d_verify_reference,
            conv1d_verify_slots_reference,
            fold_conv_reference,
        )

        # The CPU engine's own convolution multiplies in float32, whatever the inputs: a verify must see what it sees.
        verify = partial(conv1d_verify_reference, compute_dtype=torch.float32)
        return Conv1dOps(verify, commit_conv_reference, fold_conv_reference, conv1d_verify_slots_reference)
    raise ValueError(f"no kernels for device type {kind!r}: expected 'cuda' or 'cpu'")
