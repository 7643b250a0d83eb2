"""SGLang's CPU engine for hybrid linear-attention models, where `sgl_kernel` cannot load.

`install()` is called first thing in every process; where `needed()` is false it does nothing. It puts plain-PyTorch
versions of the missing ops in place (`stub`, `gdn_ops`, `mamba2_ops`, `conv1d_ops`, `speculative_ops`, `commit_ops`),
a reference attention backend (`attention`), replacements for code that assumes a CUDA device (`patches`), and the
server arguments that a CPU needs where the user gave none (`defaults`).
"""

from __future__ import annotations

import ctypes
import functools
import sys

_installed: list[str] | None = None


@functools.cache
def needed() -> bool:
    """Whether this machine has SGLang's CUDA build but no CUDA driver, so that `sgl_kernel` cannot load."""
    import torch

    if sys.platform != "linux" or torch.version.cuda is None:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def install() -> list[str]:
    """Set this process up for the CPU engine; idempotent.

    Returns
        what was installed, one line each; empty where nothing is `needed()`.

    Raises
        ValueError: an environment variable or (later) a server argument asks for what a CPU cannot do.
    """
    global _installed
    if _installed is not None:
        return _installed
    if not needed():
        _installed = []
        return _installed
    from sglang_mamba_mtp.cpu import defaults, patches, stub
    from sglang_mamba_mtp.cpu.hooking import when_imported

    lines = [f"environment: {item}" for item in defaults.set_environment()]
    stub.register()
    lines.append(f"sgl_kernel: stub from {stub.SHIM_FOLDER}")
    defaults.announce_cpu()
    when_imported("sglang.srt.server_args", defaults.hook_server_args)
    lines.append("server arguments: CPU defaults")
    lines += patches.apply_all()
    when_imported("sglang.srt.layers.attention.attention_registry", _register_attention)
    lines.append("attention backend torch_native: reference attention with target verify")
    _installed = lines
    return _installed


def _register_attention(_module: object) -> None:
    from sglang_mamba_mtp.cpu import attention

    attention.register()
