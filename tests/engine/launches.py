"""Which of our kernels an engine compiles, and when. On a GPU Triton says so; on a CPU it is worked out.

On a CPU every op runs twice: its Triton launcher, of which only what Triton would compile the kernel for is noted
(types, values and alignments of its arguments), and the PyTorch op that does the work. Launches that differ in what is
noted are compiled apart. The verifies themselves are left out: on a GPU it is captured graphs that launch them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Launches:
    """Collects what is compiled in ``seen``, each once: "kernel(what it is compiled for)"."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}


def watch(device: str) -> Launches:
    """Collect from now on; call before a model is built."""
    return Compiled() if device == "cuda" else Specialised()


class Compiled(Launches):
    """What Triton compiles, or loads from its cache on disk."""

    def __init__(self) -> None:
        super().__init__()
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *, fn: Any, repr: str, **_: Any) -> None:
        if fn.module.startswith("mamba_mtp_kernels"):
            self.seen[repr] = None


class Specialised(Launches):
    """What Triton would compile for a Hopper."""

    def __init__(self) -> None:
        super().__init__()
        self._binders: dict[Any, Callable[..., Any]] = {}
        from mamba_mtp_kernels import common, conv1d, gdn, mamba2
        from triton.runtime.jit import JITFunction

        for package in (common, conv1d, gdn, mamba2):
            package.ops_for = self._both(package.ops_for)

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._note(kernel, args, options)

        JITFunction.run = run

    @staticmethod
    def _both(ops_for: Callable[..., Any]) -> Callable[..., Any]:
        def both(device: Any, *args: Any) -> Any:
            plain = ops_for("cpu", *args)
            pairs = zip(plain._fields, ops_for("cuda", *args), plain, strict=True)
            return type(plain)(*(op if "verify" in name else _after(launch, op) for name, launch, op in pairs))

        return both

    def _note(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if kernel not in self._binders:
            from triton.backends.compiler import GPUTarget
            from triton.compiler import make_backend
            from triton.runtime.jit import create_function_from_signature

            backend = make_backend(GPUTarget("cuda", 90, 32))
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = self._binders[kernel](*args, **options)
        arguments = (f"{name}={_plain(value)}" for name, value in zip(bound, specialization, strict=True))
        self.seen[f"{kernel.__name__}({', '.join(arguments)}; {rest})"] = None


def _after(launch: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, which does the work, with its launcher called before it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        launch(*args, **kwargs)
        return op(*args, **kwargs)

    return run


def _plain(value: tuple[Any, ...]) -> str:
    kind, detail = value[0], value[1] if len(value) > 1 else None
    return str(detail) if kind == "constexpr" else f"{kind}{'' if detail in (None, '') else f':{detail}'}"
