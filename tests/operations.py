"""What PyTorch is asked for while something runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Names of the operations that PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))
