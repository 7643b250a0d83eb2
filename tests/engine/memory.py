"""How much memory of its device an engine has, to see whether requests leave some behind, and what."""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .states import State

SHOWN = 8
"""Places that are told, and calls of each."""


class Memory:
    """``in_use`` are the readings so far: bytes of tensors, and bytes that PyTorch took for them from the device. A
    GPU's are its allocator's, in blocks of 512; a CPU's those that Python can reach, without states that a test has
    recorded there, and 0."""

    def __init__(self) -> None:
        self.in_use: list[tuple[int, int]] = []

    def read(self) -> None:
        """Once more. On a GPU, who takes memory is noted from the second reading on, when all is warm."""
        gc.collect()  # the tree that SGLang drops at a flush is a ring of references; on CUDA it collects none
        if not torch.cuda.is_initialized():
            self.in_use.append((_on_the_cpu(), 0))
            return
        self.in_use.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        if len(self.in_use) == 2:
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python")

    def holders(self) -> list[str]:
        """Where the blocks of a GPU that were taken since the second reading, and are still, were asked for."""
        if len(self.in_use) < 2 or not torch.cuda.is_initialized():
            return []
        return taken_by(block for segment in torch.cuda.memory._snapshot()["segments"] for block in segment["blocks"])


def taken_by(blocks: Iterable[Mapping[str, Any]]) -> list[str]:
    """The places most blocks in use were asked for at, and how many bytes; of those whose place is known."""
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for block in blocks:
        if block["state"] != "active_allocated" or not block.get("frames"):
            continue
        calls = [frame for frame in block["frames"] if frame["filename"].endswith(".py")][:SHOWN]
        where = " < ".join(f"{call['filename']}:{call['line']} {call['name']}" for call in calls)
        counts[where] += 1
        sizes[where] += block["size"]
    return [f"{count} blocks, {sizes[where]} bytes: {where}" for where, count in counts.most_common(SHOWN)]


def _on_the_cpu() -> int:
    alive = gc.get_objects()
    recorded = {tensor.untyped_storage().data_ptr() for state in _of(State, alive) for tensor in _tensors(state)}
    storages = [tensor.untyped_storage() for tensor in _of(torch.Tensor, alive) if tensor.device.type == "cpu"]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for where, size in sizes.items() if where not in recorded)


def _of(kind: type, alive: list[Any]) -> Iterator[Any]:
    """Those of a class; asking an object itself may wake a lazy one."""
    return (each for each in alive if issubclass(type(each), kind))


def _tensors(state: State) -> tuple[torch.Tensor, ...]:
    return state.temporal, *state.conv
