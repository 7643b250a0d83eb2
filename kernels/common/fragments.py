"""Tiles of state that lie in registers as tensor cores want them, and products of float32 accuracy (jit helpers only).

**Tiles.** A piece of a head's state, BLOCK_P rows by PART columns, is a tile of three axes: rows, chunks, columns of a
chunk. Loaded so, a lane holds 16 bytes of a row, four lanes a chunk, and the eight lanes left go to rows. Of an operand
of 16 x 16 a lane must hold columns 2t, 2t + 1, 2t + 8 and 2t + 9 in rows g and g + 8. A sum over columns runs in any
order, so columns are named anew: what lies at 4t + 2h + p of a chunk is column 8h + 2t + p of the product (16-bit
states, whose 16 bytes are 8 elements: 8t + 4s + 2h + p is 16s + 8h + 2t + p). The other factor's columns are renamed
alike (in_product_order), rows are dealt out to warps in the same spirit (tile_row), and nothing passes through shared
memory on its way. All of it only names elements: on any device, in any layout, the numbers are the same.

**Loads.** What is renamed may pass through shared memory, and behind its barrier no later load is issued: what is
needed together is loaded first, all of it (load_rows, load_columns), and then renamed (rows_as_left, columns_as_right).

**Products.** A 16-bit factor is exact on a tensor core. The float32 one beside it is cut into addends: two bf16 have 16
bits and suffice for an output of 16 bits, three have 24, all of float32's. Beside a float16 factor they are tf32
numbers. Two float32 factors are Triton's to cut (tf32x3, 22 bits).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Which axis of a three-dimensional tile gets the lanes left over: the first before the second in Triton 3.6, the other
# way round in 3.8. A matter of speed alone.
ROW_AXIS = tl.constexpr(0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 1)


def chunk_of(state: torch.dtype, columns: int) -> int:
    """Columns of a chunk of a state tile: four lanes' 16 bytes, or half of it where columns are few."""
    return 32 if state.itemsize == 2 and columns >= 32 else 16


@triton.jit
def inside(index, SIZE: tl.constexpr, COVERED: tl.constexpr):
    """index < SIZE; COVERED: the blocks end with SIZE, and the compiler may drop the test."""
    if COVERED:
        return tl.full(index.shape, True, tl.int1)
    return index < SIZE


@triton.jit
def tile_row(BLOCK_P: tl.constexpr, WARPS: tl.constexpr):
    """[BLOCK_P]: the row of the piece that is row r of a tile. BLOCK_P is a multiple of 16 WARPS."""
    r = tl.arange(0, BLOCK_P)
    return ((r // (16 * WARPS) * WARPS + r // 8 % WARPS) * 2 + r // (8 * WARPS) % 2) * 8 + r % 8


@triton.jit
def tile_column(PART: tl.constexpr, CHUNK: tl.constexpr):
    """[PART // CHUNK, CHUNK]: the columns of a tile."""
    return tl.arange(0, PART // CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def per_row(x):
    """x [BLOCK_P] as a tile of one column."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1 - ROW_AXIS)


@triton.jit
def per_column(x):
    """x [PART // CHUNK, CHUNK] as a tile of one row."""
    return tl.expand_dims(x, ROW_AXIS)


@triton.jit
def as_left(tile, WARPS: tl.constexpr):
    """A tile as the left factor [BLOCK_P, PART] of a product: rows of the piece, columns renamed."""
    if ROW_AXIS == 1:
        tile = tl.permute(tile, (1, 0, 2))
    ROWS: tl.constexpr = tile.shape[0]
    CHUNKS: tl.constexpr = tile.shape[1]
    CHUNK: tl.constexpr = tile.shape[2]
    x = tl.reshape(tile, [ROWS // (16 * WARPS), 2, WARPS, 8, CHUNKS, 4, CHUNK // 16, 2, 2])
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 4, 6, 7, 5, 8)), [ROWS, CHUNKS * CHUNK])


@triton.jit
def as_tile(product, CHUNK: tl.constexpr, WARPS: tl.constexpr):
    """A product [BLOCK_P, PART] with renamed columns as a tile: undoes as_left."""
    ROWS: tl.constexpr = product.shape[0]
    CHUNKS: tl.constexpr = product.shape[1] // CHUNK
    x = tl.reshape(product, [ROWS // (16 * WARPS), WARPS, 2, 8, CHUNKS, CHUNK // 16, 2, 4, 2])
    tile = tl.reshape(tl.permute(x, (0, 2, 1, 3, 4, 7, 5, 6, 8)), [ROWS, CHUNKS, CHUNK])
    if ROW_AXIS == 1:
        tile = tl.permute(tile, (1, 0, 2))
    return tile


@triton.jit
def in_product_order(x, CHUNK: tl.constexpr):
    """x [M, PART] with its columns renamed as as_left names them."""
    ROWS: tl.constexpr = x.shape[0]
    PART: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [ROWS, PART // CHUNK, 4, CHUNK // 16, 2, 2])
    return tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5)), [ROWS, PART])


@triton.jit
def _rows_in_product_order(x, CHUNK: tl.constexpr):
    """x [PART, M] with its rows renamed as as_left names columns."""
    PART: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [PART // CHUNK, 4, CHUNK // 16, 2, 2, COLUMNS])
    return tl.reshape(tl.permute(x, (0, 2, 3, 1, 4, 5)), [PART, COLUMNS])


@triton.jit
def load_rows(rows_at, stride, at, SIZE: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    """PART columns of the rows of SIZE at rows_at + position * stride, zeros where nothing is, for `rows_as_left`.

    at: the M rows' positions, which of them are there, and the first column.

    By the tile, where 16 bytes are a lane's columns of a chunk: as a state's rows are dealt out, a lane then has what
    it gives to a product.
    """
    position, live, first = at
    if PART > CHUNK and CHUNK * rows_at.dtype.element_ty.primitive_bitwidth == 4 * 128:
        column = first + tile_column(PART, CHUNK)
        return tl.load(
            rows_at + (per_row(position * stride) + per_column(column)),
            mask=per_row(live) & per_column(inside(column, SIZE, SIZE % PART == 0)),
            other=0.0,
        )
    else:
        column = first + tl.arange(0, PART)
        return tl.load(
            rows_at + position[:, None] * stride + column[None, :],
            mask=live[:, None] & inside(column, SIZE, SIZE % PART == 0)[None, :],
            other=0.0,
        )


@triton.jit
def _after_all_loads(x, NATIVE: tl.constexpr):
    """x, which the compiler no longer follows to its load: it would rename at once what a load brings, and only then
    issue the next one."""
    if NATIVE:
        if x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@triton.jit
def rows_as_left(x, CHUNK: tl.constexpr, NATIVE: tl.constexpr):
    """What `load_rows` loaded as [M, PART], columns renamed."""
    return _rows_renamed(_after_all_loads(x, NATIVE), CHUNK)


@triton.jit
def _rows_renamed(x, CHUNK: tl.constexpr):
    if len(x.shape) == 3:
        if ROW_AXIS == 1:
            x = tl.permute(x, (1, 0, 2))
        return in_product_order(tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]]), CHUNK)
    else:
        return in_product_order(x, CHUNK)


@triton.jit
def load_columns(rows_at, stride, at, SIZE: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    """The same rows for `columns_as_right`."""
    if PART > CHUNK and CHUNK * rows_at.dtype.element_ty.primitive_bitwidth == 4 * 128:
        return load_rows(rows_at, stride, at, SIZE, PART, CHUNK)
    else:
        position, live, first = at
        column = first + tl.arange(0, PART)
        return tl.load(
            rows_at + position[None, :] * stride + column[:, None],
            mask=live[None, :] & inside(column, SIZE, SIZE % PART == 0)[:, None],
            other=0.0,
        )


@triton.jit
def columns_as_right(x, CHUNK: tl.constexpr, NATIVE: tl.constexpr):
    """What `load_columns` loaded as [PART, M], rows renamed. (Triton 3.8 passes what is turned after a load by the tile
    through shared memory.)"""
    return _columns_renamed(_after_all_loads(x, NATIVE), CHUNK)


@triton.jit
def _columns_renamed(x, CHUNK: tl.constexpr):
    if len(x.shape) == 3:
        return tl.trans(_rows_renamed(x, CHUNK))
    else:
        return _rows_in_product_order(x, CHUNK)


@triton.jit
def load_in_product_order(rows_at, stride, at, SIZE: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    """Of a single tile, which waits for nothing beside it: [M, PART] of these rows, columns renamed."""
    return _rows_renamed(load_rows(rows_at, stride, at, SIZE, PART, CHUNK), CHUNK)


@triton.jit
def load_right_in_product_order(rows_at, stride, at, SIZE: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr):
    """The same as [PART, M]."""
    return _columns_renamed(load_columns(rows_at, stride, at, SIZE, PART, CHUNK), CHUNK)


@triton.jit
def _cut(x, MASK: tl.constexpr):
    """x without its low bits."""
    return (x.to(tl.int32, bitcast=True) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def addends(x, PARTNER: tl.constexpr, COUNT: tl.constexpr):
    """x float32 as a tuple of COUNT addends, the smallest first, of types to be multiplied with dtype PARTNER.

    Cut off, not rounded: then an addend is needed in one type only and the compiler converts in pairs.
    """
    if tl.float32 == PARTNER:
        return (x,)
    else:
        MASK: tl.constexpr = -65536 if tl.bfloat16 == PARTNER else -8192  # bf16's bits, or tf32's
        TYPE: tl.constexpr = tl.bfloat16 if tl.bfloat16 == PARTNER else tl.float32
        high = _cut(x, MASK)
        rest = x - high
        if COUNT == 2:
            return (rest.to(TYPE), high.to(TYPE))
        else:
            mid = _cut(rest, MASK)
            return ((rest - mid).to(TYPE), mid.to(TYPE), high.to(TYPE))


@triton.jit
def state_addends(state, PARTNER: tl.constexpr, COUNT: tl.constexpr):
    """`addends` of a state as stored; two hold any 16-bit state, and one that is of PARTNER's type needs no cutting."""
    if state.dtype == PARTNER:
        return (state,)
    else:
        return addends(state.to(tl.float32), PARTNER, COUNT if state.dtype == tl.float32 else 2)


@triton.jit
def _as_of_no_load(x):
    """x float32, which the compiler no longer follows to a load.

    It takes the columns of a product in an order (kWidth) that goes by the narrowest load it finds behind a factor, so
    that a 16-bit state fresh from memory and the same numbers out of a loop would be summed in different orders.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _dot(left, right, acc, NATIVE: tl.constexpr):
    if left.dtype == tl.float32 and right.dtype == tl.float32:
        if NATIVE:
            return tl.dot(_as_of_no_load(left), right, acc, input_precision="tf32x3")
        else:
            return tl.dot(left, right, acc, input_precision="ieee")
    elif NATIVE and left.dtype == right.dtype:
        return tl.dot(left, right, acc)
    else:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="tf32")


@triton.jit
def multiply_add(left, right, acc, NATIVE: tl.constexpr):
    """acc + left @ right in float32, factors given as tuples of addends, the smallest products first.

    The smallest addends of two cut factors are not multiplied with each other: that product lies below the bits that
    the cut left out. NATIVE: 16-bit products; else in float32, all that Triton's interpreter can do.
    """
    for i in tl.static_range(len(left)):
        for j in tl.static_range(len(right)):
            if i + j > 0 or len(left) == 1 or len(right) == 1:
                acc = _dot(left[i], right[j], acc, NATIVE)
    return acc


@triton.jit
def multiply(left, right, NATIVE: tl.constexpr):
    """left @ right, see multiply_add."""
    return multiply_add(left, right, tl.zeros([left[0].shape[0], right[0].shape[1]], tl.float32), NATIVE)
