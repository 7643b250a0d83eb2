"""A convolution's state in words of 64 bits (jit helpers only): three entries of 16 bits to a channel, without gaps.

    four channels c of the state are three words,  c0t0 c0t1 c0t2 c1t0 | c1t1 c1t2 c2t0 c2t1 | c2t2 c3t0 c3t1 c3t2,
    of a token they are one,                       c0 c1 c2 c3,

lowest bits first; t0 is the oldest token. Entries are copied, never computed with.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAPS = tl.constexpr(3)
WORD = tl.constexpr(4)  # entries


@triton.jit
def _entry(words, place: tl.constexpr, to: tl.constexpr):
    """The entry at one of a word's four places, brought to another; zeros around it."""
    return ((words >> (16 * place)) & 0xFFFF) << (16 * to)


@triton.jit
def _tokens_of(first, second, third):
    """A word of each token, from the three of their state."""
    oldest = _entry(first, 0, 0) | _entry(first, 3, 1) | _entry(second, 2, 2) | _entry(third, 1, 3)
    middle = _entry(first, 1, 0) | _entry(second, 0, 1) | _entry(second, 3, 2) | _entry(third, 2, 3)
    newest = _entry(first, 2, 0) | _entry(second, 1, 1) | _entry(third, 0, 2) | _entry(third, 3, 3)
    return oldest, middle, newest


@triton.jit
def inputs_before_in_words(where, word, inside):
    """As history.inputs_before, K = 4: words of four channels, oldest token first. word: which of a token's.

    where: count, the row's order, its window and a token's stride in it, the state.
    """
    count, order_row, window, stride_token, state = where
    held = state.to(tl.pointer_type(tl.int64)) + word * TAPS
    some = inside & (count < TAPS)
    old = _tokens_of(
        tl.load(held, mask=some, other=0), tl.load(held + 1, mask=some, other=0), tl.load(held + 2, mask=some, other=0)
    )
    found = ()
    for place in tl.static_range(TAPS):
        token = count - TAPS + place  # < 0: an entry of the state, the one at count + place
        position = tl.load(order_row + tl.maximum(token, 0)).to(tl.int64)
        waiting_at = (window + position * stride_token).to(tl.pointer_type(tl.int64)) + word
        waiting = tl.load(waiting_at, mask=inside & (token >= 0), other=0)
        entry = old[TAPS - 1]
        for earlier in tl.static_range(TAPS - 1):
            entry = tl.where(count + place == earlier, old[earlier], entry)
        found = found + (tl.where(token >= 0, waiting, entry),)  # noqa: RUF005 (jit: no unpacking)
    return found


@triton.jit
def store_words(state, tokens, word, inside):
    """The state whose tokens' words these are."""
    oldest, middle, newest = tokens
    to = state.to(tl.pointer_type(tl.int64)) + word * TAPS
    first = _entry(oldest, 0, 0) | _entry(middle, 0, 1) | _entry(newest, 0, 2) | _entry(oldest, 1, 3)
    second = _entry(middle, 1, 0) | _entry(newest, 1, 1) | _entry(oldest, 2, 2) | _entry(middle, 2, 3)
    third = _entry(newest, 2, 0) | _entry(oldest, 3, 1) | _entry(middle, 3, 2) | _entry(newest, 3, 3)
    tl.store(to, first, mask=inside)
    tl.store(to + 1, second, mask=inside)
    tl.store(to + 2, third, mask=inside)
