"""Environment variables and server arguments the CPU engine needs, set where the user set none.

A value the user gave is never overridden; one that cannot work on a CPU raises an error that names it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import config

ENVIRONMENT: dict[str, str] = {
    # SGLang's is_cpu(); read when its modules are imported.
    "SGLANG_USE_CPU_ENGINE": "1",
    # torch.compile in the NEXTN draft path has no CPU toolchain worth waiting for.
    "TORCHDYNAMO_DISABLE": "1",
}

CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"
DTYPES = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}


@dataclass(frozen=True)
class Default:
    """Server argument `name` becomes `value` where it is still one of `unset`."""

    name: str
    value: Any
    reason: str
    unset: tuple[Any, ...] = (None,)


DEFAULTS: tuple[Default, ...] = (
    Default("device", "cpu", "there is no CUDA driver"),
    Default("attention_backend", "torch_native", "the reference attention of sglang_mamba_mtp.cpu"),
    Default("disable_prefill_cuda_graph", True, "no CUDA graphs", (False,)),
    Default("disable_decode_cuda_graph", True, "no CUDA graphs", (False,)),
    Default("disable_custom_all_reduce", True, "it is for GPUs", (False,)),
    Default("hicache_io_backend", "direct", "the other one's copies are CUDA kernels", ("kernel",)),
    Default("lora_backend", "torch_native", "the others are Triton kernels", ("csgmv",)),
    Default("sleep_on_idle", True, "an idle scheduler asks for work without a pause, and would keep a core", (False,)),
    Default("max_running_requests", 8, "a CPU serves a few requests well"),
    Default("max_total_tokens", 32768, "sized by hand, not from free memory that others use too"),
    Default("max_mamba_cache_size", 64, "sized by hand, not from free memory that others use too"),
)

CANNOT_WORK: dict[str, Callable[[Any], str | None]] = {
    "device": lambda v: None if v in (None, "cpu") else "there is no such device; use cpu or leave it out",
    **dict.fromkeys(
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
        lambda v: (
            None
            if v in (None, "torch_native", "intel_amx")
            else "it needs a GPU; use torch_native (sglang_mamba_mtp's reference attention) or leave it out"
        ),
    ),
    "speculative_draft_attention_backend": lambda v: (
        None if v in (None, "torch_native") else "it needs a GPU; use torch_native or leave it out"
    ),
    "linear_attn_backend": lambda v: (
        None if v in (None, "triton") else "only its default has CPU versions of the ops; leave it out"
    ),
    "kv_cache_dtype": lambda v: (
        None if "fp8" not in str(v) and "fp4" not in str(v) else "the CPU attention reads unquantised caches; use auto"
    ),
    "speculative_use_rejection_sampling": lambda v: (
        "a Triton kernel verifies drafts that are drawn; leave it out, temperatures are heeded without" if v else None
    ),
    "pp_size": lambda v: None if v in (None, 1) else "the CPU engine of this package has one stage; use --tp-size",
}
"""Server arguments with values that cannot work here: `check(value)` is None, or why not and what to do."""


def set_environment() -> list[str]:
    """Set ENVIRONMENT for this process and its children. Returns what was set."""
    done = []
    for name, value in ENVIRONMENT.items():
        given = os.environ.get(name)
        if given is None:
            os.environ[name] = value
            done.append(f"{name}={value}")
        elif given != value:
            raise ValueError(f"{name}={given}: without a CUDA driver SGLang needs {name}={value}; unset it")
    return done


def announce_cpu() -> None:
    """Tell the SGLang modules that were imported before the plugin that this is a CPU engine."""
    common = sys.modules.get("sglang.srt.utils.common")
    if common is not None:
        common.is_cpu.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.") and getattr(module, "_is_cpu", None) is False:
            module._is_cpu = True  # type: ignore[attr-defined]


def checkpoint_dtype(model_path: str) -> str | None:
    """The dtype a local checkpoint's config.json names, or None."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    content = json.loads(config.read_text())
    name = content.get("dtype") or content.get("torch_dtype")
    if name is None:
        text = content.get("text_config") or {}
        name = text.get("dtype") or text.get("torch_dtype")
    return DTYPES.get(str(name).removeprefix("torch."))


def apply(args: Any) -> None:
    """Check and complete raw server arguments, in place, before SGLang resolves them.

    Args
        args: a `ServerArgs` whose fields hold what the user gave or the class defaults.

    Raises
        ValueError: names the flag, the value, and what to do instead.
    """
    for name, check in CANNOT_WORK.items():
        value = getattr(args, name, None)
        why = check(value)
        if why is not None:
            flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
            raise ValueError(f"{flag} cannot work on a machine without a CUDA driver: {why}")
    for default in DEFAULTS:
        if hasattr(args, default.name) and getattr(args, default.name) in default.unset:
            setattr(args, default.name, default.value)
    if args.mamba_radix_cache_strategy == "no_buffer":
        args.disable_overlap_schedule = True  # SGLang refuses the pair; there is nothing to overlap with on a CPU
    if CONV_DTYPE not in os.environ:
        # SGLang defaults to bfloat16, which would round a float32 model's conv inputs in the cache.
        dtype = DTYPES.get(str(args.dtype)) or checkpoint_dtype(str(args.model_path))
        if dtype is not None:
            os.environ[CONV_DTYPE] = dtype


def hook_server_args(module: ModuleType) -> None:
    """Run `apply` on every ServerArgs before SGLang resolves it.

    Up to 0.5.18 that is the start of `__post_init__`. Later it is `resolve_once`: ServerArgs becomes a msgspec struct,
    which never looks at a replaced `__post_init__`.
    """
    cls = module.ServerArgs
    name = "resolve_once" if hasattr(cls, "resolve_once") else "__post_init__"
    original = getattr(cls, name)

    @functools.wraps(original)
    def completed(self: Any) -> None:
        done = getattr(self, "_resolution_finished", False) or getattr(self, "_resolution_failed", False)
        if not done and str(self.model_path).lower() not in ("none", "dummy"):
            try:
                apply(self)
            except ValueError as error:
                if config.on_command_line():
                    raise SystemExit(f"mamba-mtp: {error}") from error
                raise
        original(self)

    setattr(cls, name, completed)
