"""A pretend device: CPU tensors that know they live on a device, and complain when the host reads them.

`watch()` runs code in which ``DEVICE`` names the pretend device. Tensors created there, moved there or computed from
such tensors belong to it; whatever would make the host wait for a real device is recorded by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

DEVICE = "cpu:0"
"""The pretend device's name: torch takes it for the CPU, which is called "cpu" everywhere else."""

READS = {
    "cpu", "item", "tolist", "numpy", "nonzero", "unique", "masked_select", "argwhere",
    "__bool__", "__int__", "__float__", "__index__", "__iter__", "is_nonzero", "equal", "allclose",
}  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor of the pretend device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in READS and (name != "__iter__" or args[0].dim() == 1):
            Watch.reads.append(name)
        if name in ("__getitem__", "__setitem__") and _has_mask(args[1]):
            Watch.reads.append(f"{name} with a mask")
        if name in ("__getitem__", "__setitem__") and _has_list(args[1]):
            Watch.reads.append(f"{name} with a list")
        if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[1], OnDevice):
            Watch.reads.append("repeat_interleave without output_size")
        if name == "to" and _names_host(args, kwargs):
            Watch.reads.append("to host")
        return super().__torch_function__(function, types, args, kwargs)


def _has_mask(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, OnDevice) and part.dtype == torch.bool for part in parts)


def _has_list(index) -> bool:
    """A list is sent to the device from pageable memory, and the host waits until it is there."""
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


def _names_host(args, kwargs) -> bool:
    return any(str(target) == "cpu" for target in (*args[1:], *kwargs.values()))


class Watch(TorchFunctionMode):
    """Marks what is created on, or moved to, the pretend device."""

    reads: list[str] = []  # noqa: RUF012 - one list for all tensors

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        named = [*kwargs.values(), *(args[1:] if getattr(function, "__name__", "") == "to" else ())]
        if isinstance(out, torch.Tensor) and any(isinstance(target, str) and target == DEVICE for target in named):
            return out.as_subclass(OnDevice)
        return out


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the pretend device."""
    return tensor.as_subclass(OnDevice)


@contextlib.contextmanager
def watch() -> Iterator[list[str]]:
    """Yield the list of reads, which fills as the body runs."""
    Watch.reads.clear()
    with Watch():
        yield Watch.reads
