"""NIXL, with which a prefill server hands keys, values and states to a decode server, between processes of one host.

SGLang registers all of them as memory of a GPU. NIXL itself moves memory of the host as well, through UCX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_mamba_mtp.cpu.hooking import while_calling


def over_host_memory(init: Callable[..., None]) -> Callable[..., None]:
    """`NixlKVManager.__init__`, whose agent takes what it is told to be a GPU's memory for the host's."""

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            import nixl._api as api
        except ImportError:  # SGLang says what to install
            return init(*args, **kwargs)

        class HostAgent(api.nixl_agent):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

        return while_calling("nixl._api", nixl_agent=HostAgent)(init)(*args, **kwargs)

    return call


class HostEvent:
    """Stands for an event of a CUDA stream: on a CPU everything that was given to a stream has been done."""

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True
