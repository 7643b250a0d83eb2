"""SGLang's sleep mode: memory that a server gives back while it is idle and takes again, contents lost.

On a CPU there is no torch_memory_saver, so `MemorySaver` stands in for SGLang's adapter of it: it notes what is
allocated in a region, and from the moment the region is paused its tensors hold garbage. Nobody may read or write them
before it is resumed, which on a GPU would be an access to memory that is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KV_CACHE = "kv_cache"

GARBAGE = {True: 0xFF, False: 0x7F}
"""Bytes of lost contents: not a number where floats are, far out of any bounds where integers are."""


class _Allocations(TorchDispatchMode):
    """Collects the tensors that own memory allocated while it is active."""

    def __init__(self, found: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {address(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            if address(tensor) not in given:
                self._found[address(tensor)] = tensor
        return out


class _NoAccess(TorchDispatchMode):
    """Raises where an operation is given memory that was given back, but for those that only look at its shape."""

    def __init__(self, gone: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._gone = gone

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            for tensor in tensors_in((args, kwargs or {})):
                if tensor.numel() and address(tensor) in self._gone:
                    raise AssertionError(f"{function} is given memory that was given back: {tuple(tensor.shape)}")
        return function(*args, **(kwargs or {}))


class MemorySaver:
    """What `TorchMemorySaverAdapter.create` returns here, one for the whole process."""

    enabled = True

    def __init__(self) -> None:
        self._regions: dict[str, dict[int, torch.Tensor]] = {}
        self.released: list[str] = []
        self._watched: dict[str, _NoAccess] = {}

    def install(self) -> None:
        """Be what SGLang's pools and its scheduler are given; call before they are built."""
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        TorchMemorySaverAdapter.create = staticmethod(lambda enable: self)

    def check_validity(self, caller_name: str) -> None: ...

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Allocations(self._regions.setdefault(tag, {})):
            yield

    def configure_subprocess(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def pause(self, tag: str) -> None:
        self.released.append(tag)
        for tensor in self._regions[tag].values():
            bytes_of(tensor).fill_(GARBAGE[tensor.is_floating_point()])
        self._watched[tag] = _NoAccess(self._regions[tag])
        self._watched[tag].__enter__()

    def resume(self, tag: str) -> None:
        self._watched.pop(tag).__exit__(None, None, None)
        for tensor in self._regions[tag].values():
            if not bool((bytes_of(tensor) == GARBAGE[tensor.is_floating_point()]).all()):
                raise AssertionError(f"somebody wrote to memory given back: {tensor.dtype} {tuple(tensor.shape)}")

    def kept(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Those of the tensors that a release of the cache's memory does not give back."""
        region = self._regions.get(KV_CACHE, {})
        return [f"{t.dtype} {tuple(t.shape)}" for t in tensors if t.numel() and address(t) not in region]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def free_bytes() -> int:
    """Memory of a GPU that nobody holds, PyTorch's cache not counted; 0 where there is no GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def messages() -> list[Any]:
    """What a server is sent: release the cache's memory, then resume it. Weights stay: who takes those back loads them
    anew."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    return [ReleaseMemoryOccupationReqInput(tags=[KV_CACHE]), ResumeMemoryOccupationReqInput(tags=[KV_CACHE])]
