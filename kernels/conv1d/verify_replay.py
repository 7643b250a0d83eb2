"""Depthwise causal convolution of a draft tree: every node along its own path.

    y_i = act(bias + sum_t weight[:, t] * u_{i, K-1-t}),   u_{i, 0} = x_i, u_{i, j} = input of i's j-th ancestor,
    beyond the root the row's pending tokens, newest first, and beyond these the slot's state conv_states[slot].

Rounding as in taps.py; the sum runs from the bias over the taps from the oldest to the newest. Stock sums a tree's taps
from the newest; ours keep the chain's order for both, so a tree that is a chain gives the chain's bits, and those are
also the bits of stock's one-token decode.

Unlike stock the slot's state is only read: it lags behind its request as the recurrent state does, and moves on where
tokens are folded (fold.py). The nodes' raw inputs go to the window for that purpose, and of the outputs those that the
recurrence keeps go to its window (place.py).

Shapes: x, y [T, dim], token b*N+i is node i of batch row b; conv_states [S, dim, K-1], oldest entry first, any
strides; window inputs [R, C, dim]. A program owns BLOCK_D channels, of one part, of NODES consecutive nodes of one row.

Where all rows are chains (rows.chain) a program looks at no links, and loads what its nodes share once: each input is
four nodes' tap. The bits are the tree's. Of rows with K - 1 tokens pending no state is looked at.

Little else is read than inputs and outputs, so that a program's time is that of its waits for memory, one behind
another: where its row stands comes from the step's plan (common/plan.py) at once, and then all its inputs.

A tree's tap is a load from wherever its input lies. Where K - 1 tokens are pending and all inputs are of one type, that
is x or the window, and a program selects places, a few scalars a tap, in place of inputs. With fewer pending it selects
among the inputs before the root, one node at a time: all at once would take half as many registers again, from the
other rows as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..common.arguments import FLOATS, Arg, check
from ..common.dependent import has_dependent_launch, wait_then_let_go
from ..common.fragments import inside as fits
from ..common.grid import launch_grid
from ..common.operands import Rows
from ..common.plan import planned
from .history import inputs_before
from .options import check_width, has_silu
from .parts import Part, parts_of
from .place import output_at, part_of
from .taps import above, activated_in_powers_of_two, add_tap, product
from .window import ConvWindow

PROGRAMS_WANTED = 4096  # with fewer (row, node, 256 channels) triples each gets its own program
FEW_NODES, MANY_NODES = 4, 8  # of a program, where there are more
PROGRAMS_AT_ONCE = 2048  # about what runs together: chains' programs that are not more have few nodes
TREE_BYTES = 1024  # of an input, 16 a thread
CHAIN_REGISTERS = 64  # a thread's, where inputs have 16 bits: of sixteen programs a multiprocessor; more gain nothing


@triton.jit
def _weights(weight, stride_weight, channel, inside, K: tl.constexpr, WORDS: tl.constexpr):
    """The taps' weights [BLOCK_D], by steps up. WORDS: a channel's are one word of 64 bits, and these lie together."""
    weights = ()
    if WORDS:
        words = tl.load(weight.to(tl.pointer_type(tl.int64)) + channel, mask=inside, other=0)
        for back in tl.static_range(K):
            bits = (words >> (16 * (K - 1 - back))).to(tl.int16)
            weights = weights + (bits.to(weight.dtype.element_ty, bitcast=True),)  # noqa: RUF005 (jit: no unpacking)
    else:
        for back in tl.static_range(K):
            at = weight + channel * stride_weight + (K - 1 - back)
            weights = weights + (tl.load(at, mask=inside, other=0.0),)  # noqa: RUF005
    return weights


@triton.jit
def _newest_pending(window_row, offsets, channel, inside, K: tl.constexpr):
    """As `inputs_before`, where at least K - 1 tokens are pending, at these offsets, and all is of one dtype."""
    past = ()
    for older in tl.static_range(K - 1):
        past = past + (tl.load(window_row + offsets[older] + channel, mask=inside, other=0.0),)  # noqa: RUF005 (jit: no unpacking)
    return past


@triton.jit
def _path(node, parents_row, K: tl.constexpr):
    """A node and its K - 1 nearest ancestors, < 0 beyond the root."""
    path = (node,)
    for _ in tl.static_range(1, K):
        node = above(node, parents_row)
        path = path + (node,)  # noqa: RUF005
    return path


@triton.jit
def _beyond(path, back: tl.constexpr, past):
    """What a path that ends before it is `back` steps up finds there, among `past`, newest first."""
    found = past[0]
    for steps in tl.static_range(1, back):
        found = tl.where(path[back - steps] < 0, past[steps], found)
    return found


@triton.jit
def _sum_from_places(own, path, places, waiting, taps, channel, inside, K: tl.constexpr):
    """A node's sum, each input loaded from x or the window. waiting: where in the window the newest tokens' lie."""
    x_row, stride_x, window_row = places
    weights, acc = taps
    for back in tl.static_range(K - 1, 0, -1):
        node = path[back]
        row = tl.where(node >= 0, x_row, window_row)
        offset = tl.where(node >= 0, node * stride_x, _beyond(path, back, waiting))
        acc += product(tl.load(row + (offset + channel), mask=inside, other=0.0), weights[back])
    return acc + product(own, weights[0])


@triton.jit
def _sum_from_inputs(own, path, x_row, stride_x, past, taps, inside, K: tl.constexpr):
    """A node's sum, each input loaded from x or selected among those before the root."""
    weights, acc = taps
    for back in tl.static_range(K - 1, 0, -1):
        node = path[back]
        tree = tl.load(x_row + node.to(tl.int64) * stride_x, mask=inside & (node >= 0), other=0.0)
        acc = add_tap(acc, node, tree, _beyond(path, back, past), weights[back])
    return acc + product(own, weights[0])


@triton.jit
def _earlier(first, x_row, past, stride_x, inside, K: tl.constexpr):
    """A chain's inputs before node `first`, K - 1 of them, newest first."""
    earlier = ()
    for back in tl.static_range(1, K):
        node = first - back
        tree = tl.load(x_row + node.to(tl.int64) * stride_x, mask=inside & (node >= 0), other=0.0)
        old = past[0]
        for steps in tl.static_range(1, back):
            old = tl.where(node == -1 - steps, past[steps], old)
        earlier = earlier + (tl.where(node >= 0, tree, old),)  # noqa: RUF005
    return earlier


@triton.jit
def _chain_sum(offset: tl.constexpr, own, earlier, taps, K: tl.constexpr):
    """The sum of one of a chain's consecutive nodes, whose inputs are `own` and `earlier`."""
    weights, acc = taps
    for back in tl.static_range(K - 1, -1, -1):
        if back <= offset:
            acc += product(own[offset - back], weights[back])
        else:
            acc += product(earlier[back - offset - 1], weights[back])
    return acc


@triton.jit
def _store(acc, own, y_at, window_at, inside, SILU: tl.constexpr):
    """A node's output, and its input for the window."""
    tl.store(y_at, activated_in_powers_of_two(acc, SILU).to(y_at.dtype.element_ty), mask=inside)
    tl.store(window_at, own.to(window_at.dtype.element_ty), mask=inside)


@triton.jit
def _one_by_one(
    x_row, to, window_row, parents_row, root, stride_x, stride_token, past, taps, first, inside,
    N: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Nodes `first` and following from beginning to end, whatever lies before the root."""
    for offset in tl.range(NODES, loop_unroll_factor=1):
        node = first + offset
        there = fits(node, N, N % NODES == 0)
        position = tl.load(root + node, mask=there, other=0)
        own = tl.load(x_row + node.to(tl.int64) * stride_x, mask=inside & there, other=0.0)
        path = _path(tl.where(there, node, -1), parents_row, K)
        acc = _sum_from_inputs(own, path, x_row, stride_x, past, taps, inside, K)
        y_at = output_at(to, node, position)
        _store(acc, own, y_at, window_row + position * stride_token, inside & there, SILU)


@triton.jit
def _conv1d_verify_kernel(
    x,
    y,
    conv_states,
    weight,
    bias,
    plan,
    parents,
    window_inputs,
    first_kept,
    second_kept,
    stride_x,
    stride_state_slot,
    stride_state_dim,
    stride_tok,
    stride_weight,
    stride_plan,
    stride_parents,
    stride_inputs_row,
    stride_inputs_token,
    stride_first_row,
    stride_first_token,
    stride_second_row,
    stride_second_token,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    RESULT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHAIN: tl.constexpr,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_then_let_go(OVERLAP)
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(2) * NODES
    ALL: tl.constexpr = N % NODES == 0
    root, slot, row, before, _folding = planned(plan, b, stride_plan)
    # places of the tokens before the root and of the nodes, from the plan as well: one wait for memory for all of it
    offsets = ()
    for older in tl.static_range(K - 1):
        offsets = offsets + (tl.load(root - 1 - older) * stride_inputs_token,)  # noqa: RUF005 (jit: no unpacking)
    positions = ()
    for offset in tl.static_range(NODES):
        node = first + offset
        positions = positions + (tl.load(root + node, mask=fits(node, N, ALL), other=0),)  # noqa: RUF005
    RESULT_WIDTH: tl.constexpr = WIDTH_0 if RESULT == 0 else WIDTH_1 if RESULT == 1 else WIDTH_2
    channel, inside, to = part_of(
        tl.program_id(1), row, y + b * N * RESULT_WIDTH, first_kept, second_kept,
        (stride_first_row, stride_second_row), (stride_first_token, stride_second_token),
        WIDTH_0, WIDTH_1, WIDTH_2, RESULT, BLOCK_D,
    )  # fmt: skip
    if slot <= 0:
        _, _, is_kept, _ = to
        for offset in tl.static_range(NODES):
            node = first + offset
            zeros = tl.zeros((BLOCK_D,), y.dtype.element_ty)
            there = inside & fits(node, N, ALL) & (is_kept == 0)
            tl.store(output_at(to, node, 0), zeros, mask=there)
        return
    x_start = x + b * N * stride_x
    x_row = x_start + channel
    window_start = window_inputs + row * stride_inputs_row
    window_row = window_start + channel
    state_row = conv_states + slot * stride_state_slot + channel.to(tl.int64) * stride_state_dim
    parents_row = parents + b * stride_parents

    # what every node of the program may ask for: the taps' weights, by steps up, and the inputs before the root
    where = (before, root - before, window_start, stride_inputs_token, state_row, stride_tok)
    weights = _weights(weight, stride_weight, channel, inside, K, WORDS)
    begin = tl.zeros((BLOCK_D,), tl.float32)
    if HAS_BIAS:
        begin = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    taps = (weights, begin)
    # all loads before the first store: the compiler cannot know that they do not overlap
    own = ()
    paths = ()
    for offset in tl.static_range(NODES):
        node = first + offset
        there = fits(node, N, ALL)
        own = own + (tl.load(x_start + (node * stride_x + channel), mask=inside & there, other=0.0),)  # noqa: RUF005
        if not CHAIN:
            paths = paths + (_path(tl.where(there, node, -1), parents_row, K),)  # noqa: RUF005
    from_places = before >= K - 1 if PLACES else False
    if CHAIN:
        if from_places:
            past = _newest_pending(window_start, offsets, channel, inside, K)
        else:
            past = inputs_before(where, channel, inside, K)
        earlier = past if NODES >= N else _earlier(first, x_row, past, stride_x, inside, K)
        for offset in tl.static_range(NODES):
            node = first + offset
            here = inside & fits(node, N, ALL)
            acc = _chain_sum(offset, own, earlier, taps, K)
            window_at = window_start + (positions[offset] * stride_inputs_token + channel)
            _store(acc, own[offset], output_at(to, node, positions[offset]), window_at, here, SILU)
    elif from_places:
        places = (x_start, stride_x, window_start)
        sums = ()
        for offset in tl.static_range(NODES):
            acc = _sum_from_places(own[offset], paths[offset], places, offsets, taps, channel, inside, K)
            sums = sums + (acc,)  # noqa: RUF005
        for offset in tl.static_range(NODES):
            node = first + offset
            here = inside & fits(node, N, ALL)
            window_at = window_start + (positions[offset] * stride_inputs_token + channel)
            _store(sums[offset], own[offset], output_at(to, node, positions[offset]), window_at, here, SILU)
    else:
        past = inputs_before(where, channel, inside, K)
        _one_by_one(
            x_row, to, window_row, parents_row, root, stride_x, stride_inputs_token, past, taps, first, inside,
            N, K, NODES, SILU,
        )  # fmt: skip


def nodes_a_program(batch: int, nodes: int, dim: int, chain: bool) -> int:
    """Consecutive nodes of a row that one program convolves. chain: loads what they share once."""
    programs = batch * triton.cdiv(dim, 256)
    if programs * nodes < PROGRAMS_WANTED:
        return 1
    many = chain and programs * triton.cdiv(nodes, MANY_NODES) > PROGRAMS_AT_ONCE
    return min(triton.next_power_of_2(nodes), MANY_NODES if many else FEW_NODES)


def conv1d_verify(
    x: torch.Tensor,
    *,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    rows: Rows,
    window: ConvWindow,
    parts: Sequence[Part] | None = None,
) -> torch.Tensor:
    """Convolve the B trees of N nodes each; returns y [B*N, dim] in x's dtype, contiguous, or the result's part of it.

    x            [B*N, dim] float, inner contiguous, any token stride: read, raw inputs.
    conv_states  [S, dim, K-1] float, any strides, oldest entry first: read at the slots.
    weight       [dim, K] float, inner contiguous, K in 2..4: read.
    bias         [dim] float: read. None: no bias.
    activation   "silu", "swish" or None.
    rows         the plan and parents (of chains their shape alone) are read; outputs of padding are zero.
    window       of one layer: at the rows, the newest pending tokens' inputs are read, and node i's are written to
                 order[r, pending + i]: where the plan says that these are.
    parts        what becomes of y's channels, in order: one number, of channels that are the result, and up to two
                 tensors [R, C, ...] of x's dtype, a token's contiguous, to which as many as a token has there are
                 written, node i's at order[r, pending + i]. None: all are the result.

    Raises ValueError or TypeError on a wrong shape, dtype, stride or device, and without a plan.
    """
    sizes = check(
        slots=Arg(rows.slots, "B"),
        parents=Arg(rows.parents, ">=B N"),
        weight=Arg(weight, "dim K", FLOATS),
        bias=Arg(bias, "dim", FLOATS),
        x=Arg(x, "B*N dim", FLOATS),
        conv_states=Arg(conv_states, "S dim K-1", FLOATS, contiguous=0),
        plan=Arg(rows.plan, ">=B _"),
        order=Arg(window.order, "R C"),
        **window.inputs_as("R C"),
    )
    batch, nodes, dim, width, capacity = sizes.get_all("B N dim K C")
    check_width(width)
    window.check_room(nodes)
    plan = rows.plan_for(nodes, window.fold_threshold)
    silu = has_silu(activation)
    pieces = parts_of(parts, dim, x.dtype, window.order)
    y = torch.empty((batch * nodes, pieces.result_width), dtype=x.dtype, device=x.device)
    if batch == 0:
        return y
    # (a choice between inputs of two types is one between two sums)
    chain = rows.chain and x.dtype == conv_states.dtype
    # few programs: latency counts, each node has its own; many: share weights among some nodes, and a chain's inputs
    per_program = nodes_a_program(batch, nodes, dim, chain)
    block = min(
        TREE_BYTES // x.itemsize if per_program > 1 and not chain else 256, triton.next_power_of_2(max(pieces.widths))
    )
    inputs = window.inputs
    widest = max(tensor.stride(1) for tensor in (inputs, *pieces.kept) if tensor is not None)
    reach = max(nodes * x.stride(0), capacity * widest) + dim
    if reach >= 2**31:
        raise ValueError(f"x and window: a row's tokens reach over {reach} elements, expected fewer than 2**31")
    words = width == 4 and weight.itemsize == 2 and weight.is_contiguous() and weight.data_ptr() % 8 == 0
    overlap = has_dependent_launch(x.device)
    one_type = x.dtype == inputs.dtype == conv_states.dtype
    _conv1d_verify_kernel[launch_grid(batch, pieces.programs(block), triton.cdiv(nodes, per_program))](
        x,
        y,
        conv_states,
        weight,
        bias,
        plan,
        rows.parents,
        inputs,
        *pieces.kept,
        x.stride(0),
        conv_states.stride(0),
        conv_states.stride(1),
        conv_states.stride(2),
        weight.stride(0),
        plan.stride(0),
        rows.trees.stride(0),
        inputs.stride(0),
        inputs.stride(1),
        *pieces.strides(),
        WIDTH_0=pieces.widths[0],
        WIDTH_1=pieces.widths[1],
        WIDTH_2=pieces.widths[2],
        RESULT=pieces.result,
        N=nodes,
        K=width,
        NODES=per_program,
        BLOCK_D=block,
        HAS_BIAS=bias is not None,
        SILU=silu,
        CHAIN=chain,
        PLACES=one_type,
        WORDS=words,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
        maxnreg=CHAIN_REGISTERS if chain and x.itemsize == 2 else None,
    )
    return y
