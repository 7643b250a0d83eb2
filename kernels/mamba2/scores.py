"""Scores of a Mamba2 verify, once a group: what each token's B is to each node's C.

    scores[b, group, t, i] = B_t . C_i

All heads of a group share them (16 of Nemotron-Nano's), and each used to make them anew: at 16 nodes a tenth of its
time. A verify's programs find theirs as a tile of [token, node] and read no B but for what they fold.

Tokens t are those of verify_replay.py: BLOCK_T of them, from 0 on those that stay pending, at the end the nodes, and
behind them the MORE pending ones that find no place before the nodes; what is no token is zero, but where a row has
none of the MORE, or is padding, nothing is written. A program makes those of one row and group for so many tokens as a
tensor core takes at once. (Where programs are few a verify's make their own, with what is here: `scores_of`.)

After a convolution it starts while that ends, looks up where its tokens are, waits, and lets the verify start: what
that reads of the convolution is there then, and for the scores it waits itself (common/dependent.py). After the kernel
that makes the plan it must not: there would be no plan yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.dependent import wait_then_let_go
from ..common.fragments import columns_as_right, load_columns, load_rows, multiply, rows_as_left
from ..common.grid import launch_grid
from ..common.plan import planned

PROGRAM_TOKENS = 16  # a program's; both tiles of a verify are multiples of it


@triton.jit
def places(token, root, kept, N: tl.constexpr, BLOCK_T: tl.constexpr, MORE: tl.constexpr, STAY: tl.constexpr):
    """(position in the window, number of the node, whether it stays pending, whether it is a node) of these tokens of
    the BLOCK_T.

    root: where the row's plan has the root's place, behind it those of the other nodes and of STAY tokens, of which the
    pending ones that stay are the first. (So no position waits for the number of those.)
    """
    node = token - (BLOCK_T - N)
    is_node = node >= 0
    is_waiting = token < kept
    if MORE:
        is_waiting = is_waiting & (node < 0)
    place = tl.where(is_node, node, N + token)
    position = tl.load(root + place, mask=(token < STAY) | is_node, other=0)
    return position, node, is_waiting, is_node


@triton.jit
def later_places(token, root, kept, N: tl.constexpr, BLOCK_T: tl.constexpr):
    """(position in the window, whether it is there) of these tokens of the MORE that find no place before the nodes."""
    later = BLOCK_T - N + token
    is_later = later < kept
    return tl.load(root + N + later, mask=is_later, other=0), is_later


@triton.jit
def load_queries(
    C_group, stride_C, is_i, node_i,
    DSTATE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """C of a row's nodes in PARTS, for `as_queries`."""
    loaded = ()
    for part in tl.static_range(PARTS):
        at = (node_i, is_i, part * PART)
        loaded = loaded + (load_columns(C_group, stride_C, at, DSTATE, PART, CHUNK),)  # noqa: RUF005 (jit: no unpacking)
    return loaded


@triton.jit
def as_queries(loaded, CHUNK: tl.constexpr, NATIVE: tl.constexpr):
    """PARTS of [PART, node], rows in product order."""
    C_parts = ()
    for part in tl.static_range(len(loaded)):
        C_parts = C_parts + (columns_as_right(loaded[part], CHUNK, NATIVE),)  # noqa: RUF005
    return C_parts


@triton.jit
def load_keys(
    B_group, stride_B, position, live,
    DSTATE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """B of the tokens at these positions of the window in PARTS, for `as_keys`."""
    loaded = ()
    for part in tl.static_range(PARTS):
        at = (position, live, part * PART)
        loaded = loaded + (load_rows(B_group, stride_B, at, DSTATE, PART, CHUNK),)  # noqa: RUF005
    return loaded


@triton.jit
def as_keys(loaded, CHUNK: tl.constexpr, NATIVE: tl.constexpr):
    """PARTS of [token, PART], columns in product order."""
    B_parts = ()
    for part in tl.static_range(len(loaded)):
        B_parts = B_parts + (rows_as_left(loaded[part], CHUNK, NATIVE),)  # noqa: RUF005
    return B_parts


@triton.jit
def scores_of(B_parts, C_parts, NATIVE: tl.constexpr):
    """Scores [token, node] of keys and queries in PARTS."""
    made = tl.zeros((B_parts[0].shape[0], C_parts[0].shape[1]), tl.float32)
    for part in tl.static_range(len(B_parts)):
        made = tl.fma(multiply((B_parts[part],), (C_parts[part],), NATIVE), 1.0, made)
    return made


@triton.jit
def _mamba2_scores_kernel(
    C, scores, plan, window_B, stride_plan, stride_C, stride_wB_row, stride_wB_pos,
    N: tl.constexpr, GROUPS: tl.constexpr, DSTATE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    MORE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    STAY: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % GROUPS
    b = (tl.program_id(0) // GROUPS).to(tl.int64)
    root, slot, row, before, folding = planned(plan, b, stride_plan)
    kept = before - folding
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(1) < BLOCK_T // TOKENS:
        position, _, is_waiting, is_node = places(token, root, kept, N, BLOCK_T, MORE, STAY)
        live = is_waiting | is_node
    else:
        position, live = later_places(token - BLOCK_T, root, kept, N, BLOCK_T)
    wait_then_let_go(OVERLAP)
    # (of a second tile that has no token nobody reads the scores)
    if (slot <= 0) | ((tl.program_id(1) >= BLOCK_T // TOKENS) & (kept <= BLOCK_T - N)):
        return
    node_i = tl.arange(0, BLOCK_I)
    window_B_group = window_B + row * stride_wB_row + group * DSTATE
    C_loaded = load_queries(
        C + b * N * stride_C + group * DSTATE, stride_C, node_i < N, node_i, DSTATE, PARTS, PART, CHUNK
    )
    B_loaded = load_keys(window_B_group, stride_wB_pos, position, live, DSTATE, PARTS, PART, CHUNK)
    made = scores_of(as_keys(B_loaded, CHUNK, NATIVE), as_queries(C_loaded, CHUNK, NATIVE), NATIVE)
    own = scores + (b * GROUPS + group) * ((BLOCK_T + MORE) * BLOCK_I)
    tl.store(own + token[:, None] * BLOCK_I + node_i[None, :], made)


def mamba2_scores(
    C: torch.Tensor,
    window_B: torch.Tensor,
    plan: torch.Tensor,
    *,
    constants: dict[str, int],
    overlap: bool,
    early: bool,
) -> torch.Tensor:
    """Scores of the B trees of N nodes; returns [B, G, BLOCK_T + MORE, BLOCK_I] float32, contiguous.

    C, plan     as a verify has checked them, window_B its window's.
    constants   the verify's sizes (`verify_replay.constants_for`), of which those named above are taken.
    overlap     let the next kernel start while this one ends.
    early       start while the kernel before ends: that one must have written nothing of the plan.
    """
    batch, groups = C.shape[0] // constants["N"], C.shape[1]
    tokens = constants["BLOCK_T"] + constants["MORE"]
    scores = torch.empty((batch, groups, tokens, constants["BLOCK_I"]), dtype=torch.float32, device=C.device)
    taken = ("STAY", "N", "DSTATE", "BLOCK_I", "BLOCK_T", "MORE", "PARTS", "PART", "CHUNK", "NATIVE")
    _mamba2_scores_kernel[launch_grid(batch * groups, tokens // PROGRAM_TOKENS)](
        C, scores, plan, window_B, plan.stride(0), C.stride(0), window_B.stride(0), window_B.stride(1),
        GROUPS=groups,
        TOKENS=PROGRAM_TOKENS,
        **{name: constants[name] for name in taken},
        OVERLAP=overlap,
        num_warps=1,
        launch_pdl=overlap and early,
    )  # fmt: skip
    return scores
