"""What the tokens of a verify give to its outputs: coefficients [token, node] of x_t in y_i (jit helpers only).

Tokens are BLOCK_T: from 0 on those that stay pending, and at the end the nodes; pending ones that find no place before
the nodes are in a tile of their own, of MORE tokens, if the launch has one. With g = A dt, G the sum of g along a path
and B . C the scores (scores.py),

    coefficient[t, i] = e^{G_i - G_t} dt_t (B_t . C_i)  + D where t is node i,      0 where t is not on the path of i

Sums of g are float64, and their differences, [token, node] of them, are taken in two float32 numbers each: the sums'
own digits and what those leave. Nothing here reads the state, so a kernel may do it while the state is on its way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.elementary import softplus_rn
from ..common.fragments import addends


@triton.jit
def _has_bit(mask, bit):
    return ((mask >> bit.to(mask.dtype)) & 1) != 0


@triton.jit
def _paths(ancestors, node, is_node):
    """Bits of each node's ancestors and of the node itself; 0 where there is no node."""
    own = tl.full((), 1, ancestors.dtype) << tl.where(is_node, node, 0).to(ancestors.dtype)
    return tl.where(is_node, ancestors | own, 0)


@triton.jit
def _step_sizes(dt, is_node, bias, SOFTPLUS: tl.constexpr):
    """Nodes' step sizes after bias and softplus; 0 where there is no node."""
    dt = dt.to(tl.float32) + bias
    if SOFTPLUS:
        dt = softplus_rn(dt)
    return tl.where(is_node, dt, 0.0)


@triton.jit
def load_nodes(
    dt_row, A, D, dt_bias, ancestors_row, head, node, is_node, node_i, strides,
    N: tl.constexpr, HAS_D: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """What a tree's inputs say of a head, for `node_terms`: A, D, dt_bias, dt of tokens and of nodes, ancestors.

    node, is_node: number of the node that a token is, and whether it is one. strides: of dt a token, of A, D and bias a
    head.
    """
    stride_dt, stride_A, stride_D, stride_bias = strides
    is_i = node_i < N
    decay_rate = tl.load(A + head * stride_A).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias + head * stride_bias).to(tl.float32)
    skip = 0.0
    if HAS_D:
        skip = tl.load(D + head * stride_D).to(tl.float32)
    dt_t = tl.load(dt_row + node * stride_dt, mask=is_node, other=0.0)
    dt_i = tl.load(dt_row + node_i * stride_dt, mask=is_i, other=0.0)
    ancestors = tl.load(ancestors_row + node_i, mask=is_i, other=0)
    if N <= 32:
        ancestors = ancestors.to(tl.int32)
    return decay_rate, skip, bias, dt_t, dt_i, ancestors


@triton.jit
def node_terms(loaded, is_node, node_i, N: tl.constexpr, SOFTPLUS: tl.constexpr):
    """(A, D, step sizes of the tokens that are nodes, nodes' g and paths)."""
    decay_rate, skip, bias, dt_t, dt_i, ancestors = loaded
    is_i = node_i < N
    dt_node = _step_sizes(dt_t, is_node, bias, SOFTPLUS)
    g_i = decay_rate.to(tl.float64) * _step_sizes(dt_i, is_i, bias, SOFTPLUS).to(tl.float64)
    return decay_rate, skip, dt_node, g_i, _paths(ancestors, node_i, is_i)


@triton.jit
def _in_two(x):
    """x float64 as float32, and what that leaves of it."""
    high = x.to(tl.float32)
    return high, (x - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _at_nodes(x, is_itself):
    """x [node] where the tokens are nodes, [token]; 0 at the others. is_itself: [token, node]."""
    return tl.sum(tl.where(is_itself, x[None, :], 0.0), axis=1)


@triton.jit
def no_coefficients(
    BLOCK_T: tl.constexpr, MORE: tl.constexpr, BLOCK_I: tl.constexpr, PARTNER: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """What `coefficients` returns, of nothing: for a loop to carry until it has them."""
    coefficient = addends(tl.zeros((BLOCK_T, BLOCK_I), tl.float32), PARTNER, COUNT)
    more = ()
    if MORE:
        more = addends(tl.zeros((MORE, BLOCK_I), tl.float32), PARTNER, COUNT)
    return coefficient, more, tl.zeros((BLOCK_I,), tl.float32)


@triton.jit
def path_weights(terms, tokens, more):
    """(what the tokens' scores are multiplied with [token, node], which are on the path, which is the node itself; of
    the MORE tokens the first of these, or (); decay [node] of the state).

    terms: tokens' dt and pending ones' g, nodes' g and paths. tokens: numbers of nodes, and which token is what.
    more: of pending tokens beyond these, places, which there are, dt and g; () where there are none.
    """
    node_i, _, node, is_waiting, is_node = tokens
    dt_t, g_t, g_i, path_i = terms
    on = _has_bit(path_i[None, :], node_i[:, None])
    down_i = tl.sum(tl.where(on, g_i[:, None], 0.0), axis=0)
    down_high, down_low = _in_two(down_i)
    is_itself = node[:, None] == node_i[None, :]
    on_path = is_waiting[:, None] | (is_node[:, None] & _has_bit(path_i[None, :], tl.where(is_node, node, 0)[:, None]))
    all_waiting = tl.sum(g_t, axis=0)
    since = all_waiting - tl.cumsum(g_t, axis=0)
    after = ()
    if len(more) > 0:
        _, is_more, dt_more, g_more = more
        all_more = tl.sum(g_more, axis=0)
        since_high, since_low = _in_two(all_more - tl.cumsum(g_more, axis=0))
        log_decay = (since_high[:, None] + down_high[None, :]) + (since_low[:, None] + down_low[None, :])
        after = (tl.exp(tl.where(is_more[:, None], log_decay, 0.0)) * dt_more[:, None],)
        all_waiting += all_more
        since += all_more
    since_high, since_low = _in_two(since)
    from_high = tl.where(is_node, -_at_nodes(down_high, is_itself), since_high)
    from_low = tl.where(is_node, -_at_nodes(down_low, is_itself), since_low)
    log_decay = (from_high[:, None] + down_high[None, :]) + (from_low[:, None] + down_low[None, :])
    weight = tl.exp(tl.where(on_path, log_decay, 0.0)) * dt_t[:, None]
    return (weight, on_path, is_itself), after, tl.exp((all_waiting + down_i).to(tl.float32))


@triton.jit
def weighted_scores(scores, weights, skip, HAS_D: tl.constexpr, PARTNER: tl.constexpr, COUNT: tl.constexpr):
    """The tokens' coefficients in COUNT addends. weights: as `path_weights` has them. skip: D."""
    weight, on_path, is_itself = weights
    coefficient = tl.where(on_path, scores * weight, 0.0)
    if HAS_D:
        coefficient += tl.where(is_itself, skip, 0.0)
    return addends(coefficient, PARTNER, COUNT)


@triton.jit
def coefficients(weighing, tokens, more, HAS_D: tl.constexpr, PARTNER: tl.constexpr, COUNT: tl.constexpr):
    """(coefficients [token, node] in COUNT addends, those of the MORE tokens, decay [node] of the state).

    weighing: what `path_weights` takes, and beside it D, the tokens' scores and those of the MORE. tokens, more: as
    there.
    """
    terms, scored = weighing
    skip, scores, scores_more = scored
    weights, after, state_decay = path_weights(terms, tokens, more)
    if len(more) > 0:
        after = addends(scores_more * after[0], PARTNER, COUNT)
    return weighted_scores(scores, weights, skip, HAS_D, PARTNER, COUNT), after, state_decay
