"""How much memory of its device an engine has, to see whether requests leave some behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from .states import State


def in_use() -> tuple[int, int]:
    """Bytes of tensors, and bytes that PyTorch took for them from the device: a GPU's as its allocator counts them, in
    blocks of 512; a CPU's as those that Python can reach, without states that a test has recorded there, and 0."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    gc.collect()
    alive = gc.get_objects()
    recorded = {tensor.untyped_storage().data_ptr() for state in _of(State, alive) for tensor in _tensors(state)}
    storages = [tensor.untyped_storage() for tensor in _of(torch.Tensor, alive) if tensor.device.type == "cpu"]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for where, size in sizes.items() if where not in recorded), 0


def _of(kind: type, alive: list[Any]) -> Iterator[Any]:
    """Those of a class; asking an object itself may wake a lazy one."""
    return (each for each in alive if issubclass(type(each), kind))


def _tensors(state: State) -> tuple[torch.Tensor, ...]:
    return state.temporal, *state.conv
