"""Mamba pool states as test data: how a slot is read, recorded under its token prefix, and compared.

A state is a function of the model and of the tokens folded into it, nothing else: not of the batch it ran in, not of
the radix cache, not of speculation. So every state an engine run shows is keyed by its token prefix and compared with
the state a plain, cache-less, non-speculative run has for the same prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Prefix = bytes
"""Token ids as the bytes of an ``array("q")``: hashable, compact, exact."""


def as_prefix(token_ids) -> Prefix:
    """The key of a token sequence."""
    return array("q", token_ids).tobytes()


def as_tokens(prefix: Prefix) -> list[int]:
    """The token ids of a key."""
    tokens = array("q")
    tokens.frombytes(prefix)
    return tokens.tolist()


def name_of(token_ids) -> bytes:
    """16 bytes that stand for a token sequence where every one of a long answer's is kept."""
    return hashlib.blake2b(as_prefix(token_ids), digest_size=16).digest()


@dataclass(frozen=True)
class State:
    """One slot on the CPU: ``temporal [layers, ...]`` and ``conv``, one ``[layers, ...]`` tensor per conv state."""

    temporal: torch.Tensor
    conv: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shards:
    """How a tensor-parallel rank's part of a state is cut out of the whole.

    Of the recurrent state a rank has some heads. Its convolution state has the channels of several inputs, ``widths``
    of each (GDN: q, k, v; Mamba2: x, B, C), in each some of all channels, or where ``repeated`` all of them.
    """

    widths: tuple[int, ...]
    repeated: tuple[bool, ...]

    def joined(self, parts: Sequence[State]) -> State:
        """The whole state, from every rank's part in order of rank.

        Raises AssertionError if ranks differ where each should have the same.
        """
        temporal = torch.cat([part.temporal for part in parts], dim=1)
        return State(temporal, tuple(map(self._joined_conv, zip(*(part.conv for part in parts), strict=True))))

    def _joined_conv(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        inputs = zip(*(part.split(self.widths, dim=1) for part in parts), strict=True)
        whole = []
        for pieces, repeated in zip(inputs, self.repeated, strict=True):
            if repeated and not all(torch.equal(pieces[0], piece) for piece in pieces):
                raise AssertionError("ranks differ in channels that each of them has")
            whole.append(pieces[0] if repeated else torch.cat(pieces, dim=1))
        return torch.cat(whole, dim=1)


@dataclass(frozen=True)
class Record:
    """A state seen in a run. ``where`` says when (request and step, or the radix event), for error texts.

    ``kind`` is "prefill" or "decode" for a running request's own slot, "insert" for a slot just handed to the radix
    cache and "radix" for one the radix cache still owns at the end of the run.
    """

    kind: str
    where: str
    prefix: Prefix
    state: State


def read_state(pool: Any, slots: torch.Tensor, *, settle: bool) -> list[State]:
    """Read slots of a mamba pool, without changing the pool. The tests' only door to the pool's layout.

    ``slots`` is an int tensor [n]. With ``settle`` what a pool of the plugin's own modes holds elsewhere for a slot
    (pending tokens, a draft slot) is brought in for the reading and then put back, so that reading each step does not
    stop windows from growing; without it the slot is read as it stands, which is what the radix cache would copy.
    """
    slots = slots.to(torch.int64).reshape(-1)
    store = getattr(pool, "store", None)  # the plugin's own modes only
    if store is None or not settle:
        return _read(pool, slots)
    with _put_back(pool, slots):
        store.settle(slots)
        states = _read(pool, slots)
        store.settle(slots)
        for once, again in zip(states, _read(pool, slots), strict=True):
            if not torch.equal(once.temporal.view(torch.int32), again.temporal.view(torch.int32)):  # a NaN is one too
                raise AssertionError("settling left something to settle")
    return states


def read_given(pool: Any, slot: torch.Tensor) -> State:
    """A slot that the radix cache has just been given, as it will be once the pool has caught up with that, which is
    not before its next forward. Changes nothing in the pool."""
    slot = slot.to(torch.int64).reshape(-1)
    lengths = [length for one, length in getattr(pool, "queue", ()) if one == slot]
    if not lengths:
        return _read(pool, slot)[0]
    with _nothing_at_work(slot.device), _put_back(pool, slot):
        pool.store.state_at(slot, slot, torch.tensor(lengths[-1:], device=slot.device))
        return _read(pool, slot)[0]


def read_int8(checkpoints: Any, slot: torch.Tensor) -> State:
    """What SGLang's `MambaCheckpointPool` makes of a state that it keeps in int8."""
    slot = slot.to(torch.int64).reshape(-1)
    temporal = checkpoints.temporal.load(slot, torch.float32)[:, 0].cpu()
    return State(temporal, tuple(conv[:, slot[0]].float().cpu() for conv in checkpoints.conv))


@contextlib.contextmanager
def _nothing_at_work(device: torch.device) -> Iterator[None]:
    """With overlap a forward may be at work on the very slots that are read: on either side of this none is."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    yield
    wait()


@contextlib.contextmanager
def _put_back(pool: Any, slots: torch.Tensor) -> Iterator[None]:
    """Whatever is done to ``slots`` is undone at the end."""
    cache = pool.mamba_cache
    books = (*pool.store.bookkeeping, pool.axis_orders.bits)
    before = [tensor.clone() for tensor in books]
    saved = [states[:, slots].clone() for states in (cache.temporal, *cache.conv)]
    yield
    for tensor, old in zip(books, before, strict=True):
        tensor.copy_(old)
    for tensor, old in zip((cache.temporal, *cache.conv), saved, strict=True):
        tensor[:, slots] = old


def _read(pool: Any, slots: torch.Tensor) -> list[State]:
    cache = pool.mamba_cache
    temporal = cache.temporal[:, slots].float().cpu()
    convs = [conv[:, slots].float().cpu() for conv in cache.conv]
    states = [State(temporal[:, i].clone(), tuple(conv[:, i].clone() for conv in convs)) for i in range(len(slots))]
    orders = getattr(pool, "axis_orders", None)
    transposed = [False] * len(slots) if orders is None else orders.bits[slots].bool().tolist()
    return [_as_vk(state) if kv else state for state, kv in zip(states, transposed, strict=True)]


def _as_vk(state: State) -> State:
    """A state whose temporal part [layers, heads, V, K] really holds [layers, heads, K, V]."""
    *outer, values, keys = state.temporal.shape
    turned = state.temporal.reshape(*outer, keys, values).transpose(-1, -2).contiguous()
    return State(turned, state.conv)


def relative_error(got: State, want: State) -> float:
    """Largest relative Frobenius error over layers, of the recurrent and the conv states alike.

    A zero reference layer is measured absolutely; a NaN counts as an infinite error.
    """
    pairs = [(got.temporal, want.temporal), *zip(got.conv, want.conv, strict=True)]
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape:
            raise AssertionError(f"state shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
        difference, scale = _norms(a - b), _norms(b)
        error = torch.where(scale > 0, difference / scale, difference)
        if not bool(error.isfinite().all()):
            return float("inf")
        worst = max(worst, float(error.max()))
    return worst


def _norms(layers: torch.Tensor) -> torch.Tensor:
    """Of each layer, summed in float64 without a copy of it: comparing a real width's states takes minutes with one."""
    return torch.linalg.vector_norm(layers.flatten(1), dim=1, dtype=torch.float64)


@dataclass(frozen=True)
class Comparison:
    """What comparing a run's records with the reference states gave."""

    compared: int
    worst: float
    worst_where: str
    bad: list[str]

    def check(self) -> None:
        """Raise with the first offenders if any state was out of bound."""
        if self.bad:
            shown = "\n  ".join(self.bad[:12])
            raise AssertionError(f"{len(self.bad)} of {self.compared} states differ from the reference:\n  {shown}")


def compare(records: list[Record], reference: dict[Prefix, State], bound: float) -> Comparison:
    """Compare every record with the reference state of its prefix; a prefix without a reference is an error."""
    worst, worst_where, bad = 0.0, "", []
    for record in records:
        label = f"{record.kind} {record.where} [{len(as_tokens(record.prefix))} tokens]"
        if record.prefix not in reference:
            bad.append(f"{label}: no reference state")
            continue
        error = relative_error(record.state, reference[record.prefix])
        if error >= worst:
            worst, worst_where = error, label
        if error > bound:
            bad.append(f"{label}: relative error {error:.2e} > {bound:.0e}")
    return Comparison(len(records), worst, worst_where, bad)
