"""The inputs before a token: what a tap reaches beyond the root, and what a state is (jit helper only).

    before(count) = the K-1 newest of (conv_states[slot], inputs of the first `count` pending tokens)

With all pending tokens that is what lies before the root of a draft; with those that are folded, the next state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inputs_before(where, channel, inside, K: tl.constexpr):
    """Those K - 1 inputs [BLOCK_D] of a row's channels, newest first, in the state's dtype.

    where: count, the row's order (of which the last K - 1 of these tokens' entries are read), its window and a token's
    stride in it, the state's channels and an entry's stride.
    """
    count, order_row, window_row, stride_token, state_row, stride_entry = where
    found = ()
    for older in tl.static_range(K - 1):
        token = count - 1 - older  # < 0: an entry of the state
        position = tl.load(order_row + tl.maximum(token, 0)).to(tl.int64)
        waiting_at = window_row + position * stride_token + channel
        waiting = tl.load(waiting_at, mask=inside & (token >= 0), other=0.0)
        entry = tl.load(state_row + (K - 1 + token) * stride_entry, mask=inside & (token < 0), other=0.0)
        found = found + (tl.where(token >= 0, waiting.to(entry.dtype), entry),)  # noqa: RUF005 (jit: no unpacking)
    return found
