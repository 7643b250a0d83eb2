"""Programmatic dependent launch: a kernel that starts while the one before it on the stream still runs.

The one before says when (`gdc_launch_dependents`, which all its programs have to reach or to have ended); the next one
(launched with `launch_pdl`; else there is nothing to wait for) waits (`gdc_wait`) before it touches anything that the
one before writes or reads. What it may do until then is look up and ask for memory that has been there since before
both, and nothing else: its own outputs may lie where a tensor was that the one before still reads.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch: NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
