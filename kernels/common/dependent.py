"""Programmatic dependent launch: a kernel that starts while the one before it on the stream still runs.

The one before says when (`gdc_launch_dependents`, which all its programs have to reach or to have ended); the next one
(launched with `launch_pdl`; else there is nothing to wait for) waits (`gdc_wait`) before it touches anything that the
one before writes or reads. What it may do until then is look up and ask for memory that has been there since before
both, and nothing else: its own outputs may lie where a tensor was that the one before still reads. Hence who was
launched early lets the next one go only when its own wait is over (`wait_then_let_go`): all before both has then ended.
(gdn/prepare_products.py does so at once: the convolution before it has let it go by that rule, so all before those
two has ended; and verify, which waits for both, looks until then at nothing that either of them writes. The
convolution's half of a commit, conv1d/fold.py, does all its work while the window's half runs, which comes right before
it and lets it go by that rule: neither touches what the other does, and what is written belongs to the pool. Since
whoever waits for the second must find the first ended too, one program of the second waits, the last. Mamba2's verify,
let go by its scores' kernel by that rule, finds the convolution ended, and looks at what that wrote before it
waits; where it makes its scores itself it comes right behind the convolution, and does not.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .device import compute_capability


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch: NVIDIA GPUs from Hopper on."""
    return compute_capability(device) >= (9, 0)


@triton.jit
def wait_then_let_go(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended, then let the next one's programs start where this one's leave room."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
