"""A warp lane by lane: tensors [32], an element a lane, and what passes numbers between lanes (jit helpers only).

Of a matrix of 8 x 8 lane 4 g + t holds columns 2 t and 2 t + 1 of row g: as two float32 numbers, or as two bf16 in an
int32, the first in its lower half. That is how `mma` takes and gives its factors, and `turn` turns one. Triton's own
products take their factors through shared memory; a kernel of one warp that keeps to this never waits for that.

For kernels of one warp, whose tensors of 32 elements lie one element a lane. NATIVE: compiled. Triton's interpreter
knows no PTX: there the same comes of reshapes and products.
"""

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(32)


@triton.jit
def row_and_column():
    """(g, t) of every lane."""
    lane = tl.arange(0, LANES)
    return lane // 4, lane % 4


@triton.jit
def from_lane(x, source, NATIVE: tl.constexpr):
    """x, of 32 bits, as lane source[i] holds it, int32 [32]."""
    if NATIVE:
        bits = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r",
            [x.to(tl.int32, bitcast=True), source], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits.to(x.dtype, bitcast=True)
    else:
        return tl.gather(x, source, 0)


@triton.jit
def load(at, live, other, NATIVE: tl.constexpr):
    """tl.load of 32 bits a lane, `other` being a number."""
    if NATIVE:
        TYPE: tl.constexpr = at.dtype.element_ty
        bits = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, $3; @p ld.global.b32 $0, [$1]; }", "=&r,l,r,r",
            [at.to(tl.int64), live.to(tl.int32), tl.full([LANES], other, TYPE).to(tl.int32, bitcast=True)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        return bits.to(TYPE, bitcast=True)
    else:
        return tl.load(at, mask=live, other=other)


@triton.jit
def store(at, x, live, NATIVE: tl.constexpr):
    """tl.store of 32 bits a lane."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            [at.to(tl.int64), x.to(tl.int32, bitcast=True), live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, x, mask=live)


@triton.jit
def load_pairs(at, live, NATIVE: tl.constexpr):
    """Eight bf16 a lane, 16 bytes to whose number `at` is a multiple, as four pairs; zeros where not live."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=&r,=&r,=&r,=&r,l,r", [at.to(tl.int64), live.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = at.to(tl.pointer_type(tl.int32))
        return (
            tl.load(words, mask=live, other=0), tl.load(words + 1, mask=live, other=0),
            tl.load(words + 2, mask=live, other=0), tl.load(words + 3, mask=live, other=0),
        )  # fmt: skip


@triton.jit
def store_pairs(at, pairs, live, NATIVE: tl.constexpr):
    """Undoes load_pairs."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r", [at.to(tl.int64), pairs[0], pairs[1], pairs[2], pairs[3], live.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = at.to(tl.pointer_type(tl.int32))
        for i in tl.static_range(4):
            tl.store(words + i, pairs[i], mask=live)


@triton.jit
def even_of(pair):
    """The first of two bf16, float32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd_of(pair):
    """The second of two bf16, float32."""
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pair_cut(even, odd):
    """Two float32 as bf16, their low bits cut off, in an int32."""
    return ((even.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (odd.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def pair_rounded(even, odd, NATIVE: tl.constexpr):
    """Two float32 rounded to bf16, in an int32."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pair_cut(even.to(tl.bfloat16).to(tl.float32), odd.to(tl.bfloat16).to(tl.float32))


@triton.jit
def without_cut(x):
    """What `pair_cut` cuts off of x."""
    return x - odd_of(x.to(tl.int32, bitcast=True))


@triton.jit
def _matrix(even, odd):
    return tl.reshape(tl.join(even, odd), [8, 8])


@triton.jit
def _of_pairs(pair):
    return _matrix(even_of(pair), odd_of(pair))


@triton.jit
def _lanes(matrix):
    return tl.split(tl.reshape(matrix, [LANES, 2]))


@triton.jit
def turn(pair, NATIVE: tl.constexpr):
    """An 8 x 8 matrix of bf16 turned."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        even, odd = _lanes(tl.trans(_of_pairs(pair)))
        return pair_cut(even, odd)


@triton.jit
def mma(left, right, acc, NATIVE: tl.constexpr):
    """acc + left right^T in float32: of 16 x 8, eight or sixteen products a sum.

    left: (upper rows, lower rows) of eight columns, twice that for sixteen; right: one or two pairs, whose rows are the
    columns of the result; acc: (even, odd) of the upper rows, then of the lower ones.
    """
    if NATIVE:
        if len(right) == 2:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                [left[0], left[1], left[2], left[3], right[0], right[1], acc[0], acc[1], acc[2], acc[3]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
                " {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
                "=f,=f,=f,=f,r,r,r,f,f,f,f",
                [left[0], left[1], right[0], acc[0], acc[1], acc[2], acc[3]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        upper, lower = _matrix(acc[0], acc[1]), _matrix(acc[2], acc[3])
        for i in tl.static_range(len(right)):
            columns = tl.trans(_of_pairs(right[i]))
            upper = tl.dot(_of_pairs(left[2 * i]), columns, upper, input_precision="ieee")
            lower = tl.dot(_of_pairs(left[2 * i + 1]), columns, lower, input_precision="ieee")
        return _lanes(upper) + _lanes(lower)
