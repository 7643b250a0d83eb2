"""How gdn_verify is cut up: launch shapes and compile-time arguments of its two kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..common.fragments import chunk_of
from ..common.lanes import LANES
from .fold import PART
from .fold_tile import TOKENS
from .prepare_products import heads_a_program

FEW_HEADS = 512  # below this many states, a block of values a program
MANY_HEADS = 2048  # from this many on a program is one warp: eight of them a multiprocessor, twice over
ONE_WAVE = 1320  # heads of 9 to 16 nodes whose first kernel runs at once: ten of them a multiprocessor


@dataclass(frozen=True)
class VerifyConfig:
    """How gdn_verify is cut up. None of it changes what is computed beyond rounding.

    block_v                   values of a block, a multiple of 16.
    blocks                    of values that a program streams.
    query_chunk               pieces of the K axis of the queries (tiles.py).
    products                  the first kernel is prepare_products.py's (which `can_take_products` allows) instead of
                              prepare.py's, which query_chunk, apart and group are for.
    num_warps, prepare_warps  of the two kernels.
    num_stages, fold_stages   of the second kernel, where a row does not fold and where it does: how many blocks are in
                              hand, one computed and the others on their way.
    split                     x in two bf16 addends; else as float32, for float32 outputs.
    overlap                   let the second kernel start and load state while the first runs (programmatic dependent
                              launch), and the first while the convolution does, if after_convolution.
    registers, prepare_registers
                              caps per thread of the second kernel and of the first; None: the compiler's choice.
    apart                     what a fold needs of its tokens' keys and gates is made by programs of their own.
    group                     tokens that queries are carried over at once: a shorter chain for more registers.
    """

    block_v: int = 16
    blocks: int = 8
    products: bool = False
    query_chunk: int = 64
    num_warps: int = 1
    prepare_warps: int = 1
    num_stages: int = 2
    fold_stages: int = 2
    split: bool = True
    overlap: bool = False
    registers: int | None = None
    prepare_registers: int | None = None
    apart: bool = False
    group: int = 2


def _prepare_registers(nodes: int, products: bool, crowded: bool) -> int | None:
    """So that a multiprocessor has room for 16, 12 or 10 programs of the first kernel: with fewer, some would wait for
    others."""
    if products and nodes > 8:
        return 128 if crowded else 200
    if nodes > 4 and (nodes <= 8 or crowded):
        return 168 if products else 128
    return None


def default_config(
    *,
    nodes: int,
    values: int,
    exact: bool,
    fold_threshold: int,
    heads: int = FEW_HEADS,
    narrow: bool = False,
    overlap: bool = False,
    products: bool = False,
) -> VerifyConfig:
    """The configuration gdn_verify uses: values is V, heads is rows times HV.

    exact asks for float32 products; narrow: states have 16 bits; overlap needs a Hopper GPU; products: as in
    VerifyConfig.
    """
    tokens = fold_threshold + nodes
    many = heads >= FEW_HEADS
    once = tokens <= 3 * TOKENS.value and nodes <= TOKENS.value  # a fold loads its keys once
    # one warp a program waits for nobody; 16 nodes and what a fold holds do not fit into its registers
    alone = once and (not many or (nodes <= 8 and tokens <= 2 * TOKENS.value and heads >= MANY_HEADS))
    warps = 8 if tokens > 64 else 2 if once else 4
    block_v = 32 if once and not alone else 16
    # one warp a head issues a third less, and waits for nobody; where heads are few, two are done sooner
    slim = nodes <= (16 if many else 8)
    crowded = slim and nodes > 8 and heads > ONE_WAVE
    return VerifyConfig(
        block_v=block_v,
        blocks=triton.cdiv(values, block_v) if many else 1,
        num_warps=1 if alone else warps,
        products=products,
        prepare_warps=1 if slim or products else 2,
        prepare_registers=_prepare_registers(nodes, products, crowded),
        # of states of 16 bits one block more has to be on its way, and for small drafts there is room for it
        num_stages=(3 if once and (nodes <= 8 or narrow) else 2) if many else 1,
        fold_stages=2 if many else 1,
        split=not exact,
        overlap=overlap,
        # smaller drafts take half a microsecond to two more: their first kernel is one wave of programs
        apart=not slim,
        # a token at a time takes fewer registers
        group=1 if crowded else 2,
    )


def constants_for(
    config: VerifyConfig,
    *,
    nodes: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    fold_threshold: int,
    fold_at_once: int,
    state: torch.dtype,
    either: bool = False,
    capacity: int | None = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time arguments of the first kernel and of the second: heads (H, HV), dims (K, V).

    state: its dtype. either: slots may lie in either axis order. capacity: of the window; None: what it needs at least.
    """
    if capacity is None:
        capacity = fold_threshold + 2 * nodes
    padded_k = max(16, triton.next_power_of_2(dims[0]))
    query_chunk, part = min(config.query_chunk, padded_k), min(PART, padded_k)
    common = {
        "N": nodes, "H": heads[0], "HV": heads[1], "K": dims[0], "OVERLAP": config.overlap,
        # (no more stays pending when a row folds than when it waits: operands.Window)
        "BT": max(16, triton.next_power_of_2(fold_threshold + nodes)),
        "FOLD_STEPS": fold_at_once // TOKENS.value, "PARTS": triton.cdiv(dims[0], part), "PART": part,
        "NATIVE": not triton.knobs.runtime.interpret,
    }  # fmt: skip
    if config.products:
        prepare = {
            "PENDING": fold_threshold, "WORDS": triton.cdiv(capacity, LANES.value), "HEADS": heads_a_program(nodes),
            "ADDENDS": 3,
        }  # fmt: skip
    else:
        prepare = {
            "BN": triton.next_power_of_2(nodes), "NC": padded_k // query_chunk, "KC": query_chunk,
            "SPLIT": config.split, "APART": config.apart, "GROUP": config.group,
        }  # fmt: skip
    verify = {
        "V": dims[1], "SPLIT": config.split, "BI": max(8, triton.next_power_of_2(nodes)), "BP": config.block_v,
        "BLOCKS": config.blocks, "BLOCK": config.block_v * padded_k,
        "WARPS": min(config.num_warps, config.block_v // 16), "CHUNK": chunk_of(state, part),
        "STAGES": config.num_stages, "FOLD_STAGES": config.fold_stages, "EITHER": either,
        # most paths then fit into half of the tile that the longest needs
        "FITS_HALF": common["BT"] > 32 and 4 * nodes <= common["BT"],
    }  # fmt: skip
    return {**common, **prepare}, {**common, **verify}
