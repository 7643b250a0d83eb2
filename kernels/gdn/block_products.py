"""Products of queries and keys with keys, in a warp's lanes (jit helpers only).

Tokens stand in blocks of eight, the newest first: the nodes, then the pending tokens. A *block of rows* is a matrix of
8 x 8 as common/lanes.py lays it out, (even, odd) columns: row g a node or a token, columns the tokens of a block. An
mma gives two of them, its upper rows and its lower ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.lanes import LANES, from_lane, mma, row_and_column
from .tiles import one_over_root

BLOCK = tl.constexpr(8)


@triton.jit
def _with_older(even, odd):
    """Of a block's products with itself, those of a token with older ones; zeros for the others."""
    g, t = row_and_column()
    return (tl.where(2 * t < g, even, 0.0), tl.where(2 * t + 1 < g, odd, 0.0))


@triton.jit
def _one_over_norms(even, odd, NATIVE: tl.constexpr):
    """1 / |row g| of a block's products with itself."""
    g, _ = row_and_column()
    return one_over_root(from_lane(tl.where(g % 2 == 0, even, odd), g * 4 + g // 2, NATIVE) + 1e-6)


@triton.jit
def _products_of_rows(acc, upper, lower, right, NATIVE: tl.constexpr):
    """acc and the products of the rows of upper and of lower with those of right, all of them in pairs of bf16."""
    zero = tl.zeros([LANES], tl.float32)
    second = (zero, zero, zero, zero)
    for i in tl.static_range(0, len(right), 4):
        left = (upper[i], lower[i], upper[i + 1], lower[i + 1])
        acc = mma(left, (right[i], right[i + 1]), acc, NATIVE)
        left = (upper[i + 2], lower[i + 2], upper[i + 3], lower[i + 3])
        if len(right) == 4:
            acc = mma(left, (right[i + 2], right[i + 3]), acc, NATIVE)
        else:
            # two sums, so that half as many wait for each other
            second = mma(left, (right[i + 2], right[i + 3]), second, NATIVE)
    if len(right) == 4:
        return acc
    return (acc[0] + second[0], acc[1] + second[1], acc[2] + second[2], acc[3] + second[3])


@triton.jit
def _add(sums, found, upper, lower, right, NATIVE: tl.constexpr):
    """found and one more: the next of the sums, if there are any yet, with products of rows."""
    if len(sums) == 0:
        zero = tl.zeros([LANES], tl.float32)
        acc = (zero, zero, zero, zero)
    else:
        acc = sums[len(found)]
    return found + (_products_of_rows(acc, upper, lower, right, NATIVE),)  # noqa: RUF005 (jit: no unpacking)


@triton.jit
def add_products(sums, queries, keys, NODE_BLOCKS: tl.constexpr, NATIVE: tl.constexpr):
    """sums, none at first, with the products of some columns of queries and keys; to be taken apart by products_of.

    Keys are blocks, the newest first: those of NODE_BLOCKS blocks of nodes, then those of pending tokens. Of queries
    there are as many blocks as of nodes, the oldest first.
    """
    found = ()
    LAST: tl.constexpr = NODE_BLOCKS - 1
    for i in tl.static_range(NODE_BLOCKS):
        found = _add(sums, found, queries[0], queries[LAST], queries[i], NATIVE)
    for column in tl.static_range(len(keys)):
        if NODE_BLOCKS == 1:
            found = _add(sums, found, queries[0], keys[0], keys[column], NATIVE)
        else:
            found = _add(sums, found, queries[0], queries[1], keys[column], NATIVE)
            found = _add(sums, found, keys[1], keys[0], keys[column], NATIVE)
    for column in tl.static_range(NODE_BLOCKS, len(keys)):
        # of the pending blocks newer than this one, and of itself, two at once
        for row in tl.static_range(column, NODE_BLOCKS - 1, -2):
            lower = keys[row - 1] if row > NODE_BLOCKS else keys[row]
            found = _add(sums, found, keys[row], lower, keys[column], NATIVE)
    return found


@triton.jit
def _upper(both):
    return (both[0], both[1])


@triton.jit
def _lower(both):
    return (both[2], both[3])


@triton.jit
def products_of(sums, NODE_BLOCKS: tl.constexpr, COUNT: tl.constexpr, NATIVE: tl.constexpr):
    """What add_products has added up, of COUNT blocks of keys: 1 / |q| of each half of the rows; q . k of every block,
    its upper rows and its lower ones; 1 / |k| of the blocks of nodes; and every block's products with older keys."""
    upper = _one_over_norms(sums[0][0], sums[0][1], NATIVE)
    queries = (upper, upper)
    of_queries = ()
    products = ()
    if NODE_BLOCKS == 1:
        of_row = (_with_older(sums[1][2], sums[1][3]),)
        for column in tl.static_range(COUNT):
            even, odd = _upper(sums[1 + column])
            of_queries = of_queries + ((even, odd, even, odd),)  # noqa: RUF005 (jit: no unpacking)
            if column > 0:
                of_row = of_row + (_lower(sums[1 + column]),)  # noqa: RUF005
        norms = (_one_over_norms(sums[1][2], sums[1][3], NATIVE),)
        products = (of_row,)
    else:
        queries = (upper, _one_over_norms(sums[1][2], sums[1][3], NATIVE))
        newer = (_with_older(sums[3][2], sums[3][3]),)
        older = (_with_older(sums[5][0], sums[5][1]),)
        for column in tl.static_range(COUNT):
            of_queries = of_queries + (sums[2 + 2 * column],)  # noqa: RUF005
            if column > 0:
                newer = newer + (_lower(sums[3 + 2 * column]),)  # noqa: RUF005
            if column > 1:
                older = older + (_upper(sums[3 + 2 * column]),)  # noqa: RUF005
        norms = (_one_over_norms(sums[3][2], sums[3][3], NATIVE), _one_over_norms(sums[5][0], sums[5][1], NATIVE))
        products = (newer, older)
    # of pending blocks: as they were added, a column after the other
    by_column = ()
    taken = ()
    for column in tl.static_range(NODE_BLOCKS, COUNT):
        of_column = ()
        for row in tl.static_range(column, NODE_BLOCKS - 1, -2):
            both = sums[NODE_BLOCKS * (1 + COUNT) + len(taken)]
            of_column = of_column + (_upper(both), _lower(both))  # noqa: RUF005
            taken = taken + (row,)  # noqa: RUF005
        by_column = by_column + (of_column,)  # noqa: RUF005
    for row in tl.static_range(COUNT - NODE_BLOCKS):
        of_row = (_with_older(by_column[row][0][0], by_column[row][0][1]),)
        for column in tl.static_range(row + 1, COUNT - NODE_BLOCKS):
            of_row = of_row + (by_column[column][column - row],)  # noqa: RUF005
        products = products + (of_row,)  # noqa: RUF005
    return queries, of_queries, norms, products
