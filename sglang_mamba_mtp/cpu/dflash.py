"""DFLASH on a CPU: SGLang takes it for GPUs and other accelerators alone, and so for their attention backends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang_mamba_mtp.cpu.hooking import while_calling


class _OnAGpu:
    """A view of server arguments on which ``device`` says "cuda"."""

    device = "cuda"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def as_on_a_gpu(handle: Callable[[Any], None]) -> Callable[[Any], None]:
    """`_handle_dflash`, which asks for the device before all else, told that it is a GPU."""

    @functools.wraps(handle)
    def call(server_args: Any) -> None:
        view = getattr(sys.modules[handle.__module__], "resolving_view", None)
        if view is not None:
            while_calling(handle.__module__, resolving_view=lambda args: _OnAGpu(view(args)))(handle)(server_args)
            return
        device, server_args.device = server_args.device, "cuda"  # up to 0.5.18 it reads the record itself
        try:
            handle(server_args)
        finally:
            server_args.device = device

    return call


def in_the_drafts_dtype(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`DFlashDraftModel.forward`, whose embeddings may come in another dtype than its weights have."""

    @functools.wraps(forward)
    def call(self: Any, *args: Any, input_embeds: Any = None, **kwargs: Any) -> Any:
        if input_embeds is not None:
            input_embeds = input_embeds.to(self.fc.weight.dtype)
        return forward(self, *args, input_embeds=input_embeds, **kwargs)

    return call


def with_torch_native(backends: Any) -> tuple[str, ...]:
    """The attention backends that draft blocks, and this package's."""
    return (*backends, "torch_native")
