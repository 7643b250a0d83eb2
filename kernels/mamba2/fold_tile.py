"""The exact fold of pending tokens, as a verify and fold.py do it (jit helpers only).

Plain recurrence from the raw inputs in float32, in order, as SGLang's selective_state_update computes a token:

    S <- S * exp(A dt) + (B dt) x^T
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.elementary import exp_rn


@triton.jit
def inside(index, SIZE: tl.constexpr, COVERED: tl.constexpr):
    """index < SIZE; COVERED: the blocks end with SIZE, and the compiler may drop the test."""
    if COVERED:
        return tl.full(index.shape, True, tl.int1)
    return index < SIZE


@triton.jit
def _load_token(token, count, window):
    """Inputs of pending token `token`; beyond `count` zeros, which leave the state as it is."""
    order_row, x_head, B_group, dt_head, stride_x, stride_B, stride_dt, dim_inside, state_inside = window
    present = token < count
    position = tl.load(order_row + token, mask=present, other=0).to(tl.int64)
    x = tl.load(x_head + position * stride_x, mask=dim_inside & present, other=0.0)
    B = tl.load(B_group + position * stride_B, mask=state_inside & present, other=0.0)
    dt = tl.load(dt_head + position * stride_dt, mask=present, other=0.0)
    return x, B, dt


@triton.jit
def _step(state, x, B, dt, A):
    return state * exp_rn(A * dt) + (B.to(tl.float32) * dt) * x.to(tl.float32)[:, None]


@triton.jit
def replay_tokens(state, count, A, window):
    """state [BLOCK_P, BLOCK_S] float32 after the tokens at window positions order_row[0..count).

    window: (order_row, x_head, B_group, dt_head, stride_x, stride_B, stride_dt, dim_inside, state_inside). x_head
    points at this head's channels [BLOCK_P] of window position 0, B_group at its group's [1, BLOCK_S], dt_head at its
    scalar; stride_* lead from one window position to the next. The next token's inputs are on their way while one is
    computed.
    """
    x0, B0, dt0 = _load_token(0, count, window)
    for token in range(0, count, 2):  # two a turn: no registers are moved from "next" to "current"
        x1, B1, dt1 = _load_token(token + 1, count, window)
        state = _step(state, x0, B0, dt0, A)
        x0, B0, dt0 = _load_token(token + 2, count, window)
        state = _step(state, x1, B1, dt1, A)
    return state
