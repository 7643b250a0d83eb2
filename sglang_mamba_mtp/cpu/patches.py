"""Edges of SGLang's code that assume a CUDA device, and what stands there on a CPU. One table: `PATCHES`.

A patch is applied when its module is imported (at once if it is), so nothing is imported for its sake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from sglang_mamba_mtp.cpu import (
    commit_ops,
    conv1d_ops,
    dflash,
    expert_ops,
    host_copies,
    mamba2_ops,
    parallel_ops,
    sampling_ops,
    speculative_ops,
    transfer,
)
from sglang_mamba_mtp.cpu.hooking import rebind, when_imported, while_calling


@dataclass(frozen=True)
class Patch:
    """`make(current value)` gives the replacement of `module.attribute` (dots reach into classes)."""

    module: str
    attribute: str
    make: Callable[[Any], Any]
    reason: str
    optional: bool = False
    """The name exists in one of the supported versions only."""
    create: bool = False
    """The name is missing on a CPU and has to be made."""

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"


class HostTorch(ModuleType):
    """`torch` for one module: no pinned memory, and a tensor asked for on "cuda" is made on the CPU."""

    FACTORIES = frozenset({"zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like"})

    def __init__(self) -> None:
        super().__init__("torch", "torch without pinned memory and CUDA")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in self.FACTORIES:
            value = _on_host(value)
        setattr(self, name, value)
        return value


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "cpu")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _value(new: Any) -> Callable[[Any], Any]:
    return lambda _current: new


def _host_torch(_current: Any) -> HostTorch:
    return HostTorch()


def _torch_with_host_events(_current: Any) -> HostTorch:
    host = HostTorch()
    host.__dict__["cuda"] = SimpleNamespace(Event=transfer.HostEvent)
    return host


def _torch_with_wide_products(_current: Any) -> HostTorch:
    host = HostTorch()
    host.__dict__["mm"] = expert_ops.mm
    return host


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stands for a wait or a set-up step of a device that is not there."""


def _no_device_to_set(_device: object) -> None:
    """`_nothing` by a name of its own: torch.compile has rules of this function that are not those of `synchronize`."""


def _fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor, final: torch.Tensor
) -> None:
    """`final += sigmoid(hidden . gate) * shared`, in place; hidden, shared, final `[T, D]`, gate `[D]` or `[1, D]`."""
    gate = (hidden_states.float() @ gate_weight.float().view(-1, 1)).sigmoid()
    final += (gate * shared_output.float()).to(final.dtype)


def _with_cstddef(load_jit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_jit)
    def load(*args: Any, **kwargs: Any) -> Any:
        flags = [*(kwargs.pop("extra_cflags", None) or []), "-include", "cstddef"]
        return load_jit(*args, extra_cflags=flags, **kwargs)

    return load


def _hip_platform() -> SimpleNamespace:
    return SimpleNamespace(is_cuda=False, is_musa=False, is_npu=False, is_hip=True, is_xpu=False)


def _mtp_in_the_models_dtype(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config.dtype = torch.get_default_dtype()  # the loader's: --dtype
        original(self, config, *args, **kwargs)

    return init


def _no_library(*_args: object, **_kwargs: object) -> NoReturn:
    raise OSError("NCCL needs a GPU; ranks on a CPU talk through gloo")


def _repeated_groups(make_loader: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """SGLang's loader, told that this is no CPU where ranks repeat a group: it would take that for padding."""

    @functools.wraps(make_loader)
    def make(shard_spec: Any, *args: Any, **kwargs: Any) -> Callable[..., None]:
        loader = make_loader(shard_spec, *args, **kwargs)
        if not any(repeated for _, _, repeated in shard_spec):
            return loader
        return while_calling(_MIXER, is_cpu=lambda: False)(loader)

    return make


_RANKS = "sglang.srt.distributed.parallel_state"
_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_EXPERTS = "sglang.srt.layers.quantization.unquant"
_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_ARGUMENTS_HOOK = "sglang.srt.arg_groups.speculative_hook"
_DRAFT_WORKER = "sglang.srt.speculative.draft_worker_common"
_DRAFT_ATTENTION = "knows attention backends of accelerators alone, and would take FlashInfer"
_DFLASH_UTILS = "sglang.srt.speculative.dflash_utils"
_SAMPLING = "has kernels that draw for GPUs only"
_NO_PIN = "asks for pinned memory"
_HOST_POOLS = "sglang.srt.mem_cache.pool_host"
_EXTRA_BUFFER = "extra_buffer is refused on CPU; the ops here return what it needs"

PATCHES: tuple[Patch, ...] = (
    Patch(
        "sglang.srt.models.nemotron_h_mtp",
        "NemotronHForCausalLMMTP.__init__",
        _mtp_in_the_models_dtype,
        "builds eh_proj in the checkpoint's dtype, whatever --dtype says",
    ),
    Patch(_SCATTER, "fused_mamba_state_scatter_with_mask", _value(commit_ops.scatter_states_with_mask), "Triton"),
    Patch(_SCATTER, "fused_conv_window_scatter_with_mask", _value(commit_ops.scatter_states_with_mask), "Triton"),
    Patch(_SCATTER, "fused_conv_window_scatter_multi", _value(commit_ops.scatter_conv_windows_multi), "Triton", True),
    Patch(_SCATTER, "fused_commit_track_indices", _value(commit_ops.commit_track_indices), "Triton", True),
    Patch(_SCATTER, "track_mamba_states_if_needed", _value(commit_ops.track_states_if_needed), "Triton"),
    Patch(_SCATTER, "track_mamba_states_all_layers", _value(commit_ops.track_states_all_layers), "Triton"),
    *(
        Patch(_MIXER, name, _value(op), "mamba.py imports a conv1d for CUDA, NPU and XPU only", create=True)
        for name, op in {
            "causal_conv1d_fn": conv1d_ops.causal_conv1d_fn_cpu,
            "causal_conv1d_fn_triton": conv1d_ops.causal_conv1d_fn_cpu,
            "causal_conv1d_update": conv1d_ops.causal_conv1d_update_cpu,
            "causal_conv1d_update_triton": conv1d_ops.causal_conv1d_update_cpu,
        }.items()
    ),
    Patch(_MIXER, "mamba_chunk_scan_combined", _value(mamba2_ops.mamba_chunk_scan_combined), "Triton"),
    Patch(_MIXER, "selective_state_update", _value(mamba2_ops.selective_state_update), "Triton"),
    Patch(
        "sglang.kernels.ops.attention.fla.layernorm_gated",
        "_use_cpu",
        _value(True),
        "true with AMX only, the op exists without it",
    ),
    Patch(
        "sglang.kernels.ops.attention.fla.fused_norm_gate",
        "_use_cpu",
        _value(True),
        "true with AMX only, the op exists without it",
    ),
    Patch(
        "sglang.kernels.ops.elementwise.elementwise",
        "fused_gate_sigmoid_mul_add",
        _value(_fused_gate_sigmoid_mul_add),
        "Triton",
    ),
    Patch(
        "sglang.kernels.ops.speculative.gather_spec_extras",
        "gather_spec_extras",
        _value(speculative_ops.gather_spec_extras),
        "Triton, in the overlap schedule",
    ),
    Patch(
        sampling_ops.EAGLE_UTILS,
        "eagle_sample",
        sampling_ops.by_temperature,
        "takes the likeliest tokens on a CPU, whatever the temperature",
    ),
    *(
        Patch(module, name, _value(getattr(sampling_ops, name)), _SAMPLING, optional=not both)
        for module, both in ((sampling_ops.EAGLE_UTILS, False), (_DFLASH_UTILS, True))  # 0.5.17 asks sgl_kernel
        for name in ("top_k_renorm_prob", "top_p_renorm_prob", "tree_speculative_sampling_target_only")
    ),
    Patch(_DFLASH_UTILS, "_DFLASH_SAMPLING_VERIFY_AVAILABLE", _value(True), _SAMPLING),
    Patch("sglang.kernels.ops.speculative.ngram_corpus", "load_jit", _with_cstddef, "g++ 12 needs <cstddef>"),
    Patch(
        "sglang.srt.arg_groups.speculative_hook",
        "_disable_overlap_schedule_for_cpu",
        _value(_nothing),
        "extra_buffer_lazy needs the overlap schedule, which runs on CPU streams as well",
    ),
    Patch(_ARGUMENTS_HOOK, "_handle_dflash", dflash.as_on_a_gpu, "refuses a CPU"),
    Patch(_ARGUMENTS_HOOK, "_resolve_dflash_draft_attention_backend", _value(_nothing), _DRAFT_ATTENTION),
    Patch(
        "sglang.srt.models.dflash",
        "DFlashDraftModel.forward",
        dflash.in_the_drafts_dtype,
        "is handed embeddings in bfloat16, whatever --dtype says",
    ),
    Patch(_DRAFT_WORKER, "_SUPPORTED_DRAFT_BACKENDS", dflash.with_torch_native, _DRAFT_ATTENTION, True),
    Patch(_DRAFT_WORKER, "DRAFT_ATTENTION_BACKEND_CHOICES", dflash.with_torch_native, _DRAFT_ATTENTION, True),
    Patch(
        "sglang.srt.layers.moe.fused_moe_native",
        "moe_forward_native",
        parallel_ops.own_experts_only,
        "knows no experts of other ranks",
    ),
    *(
        Patch(
            _EXPERTS,
            f"UnquantizedFusedMoEMethod.{name}",
            expert_ops.with_squared_relu,
            "refuses experts without a gate",
        )
        for name in ("forward_cpu", "forward_native")
    ),
    Patch(
        "sglang.srt.models.nemotron_h",
        "torch",
        _torch_with_wide_products,
        "routes to experts by a product in 16 bits with an output in 32, which PyTorch has for GPUs only",
    ),
    Patch(
        _MIXER,
        "mamba_v2_sharded_weight_loader",
        _repeated_groups,
        "pads a projection whose only group every rank repeats, and fails",
    ),
    Patch(
        "sglang.srt.utils.numa_utils",
        "init_threads_binding",
        _value(_nothing),
        "refuses more ranks than NUMA nodes; without AMX nothing is bound",
    ),
    Patch(
        "sglang.srt.distributed.device_communicators.pynccl",
        "NCCLLibrary",
        _value(_no_library),
        "the CUDA build has NCCL, and only where there is none are ranks left to gloo",
    ),
    Patch(
        "sglang.srt.distributed.bootstrap",
        "_check_tp_memory_balance",
        _value(_nothing),
        "compares the free memory of ranks, which here is everybody's",
    ),
    *(
        Patch(module, op.__name__, _value(op), "imported on CUDA and ROCm only", optional=not both, create=True)
        for module, both in (
            (f"{_HOST_POOLS}.mha", True),
            (f"{_HOST_POOLS}.mamba", False),  # 0.5.17 has Mamba's pool in the next
            ("sglang.srt.mem_cache.memory_pool_host", True),
        )
        for op in (
            host_copies.transfer_kv_direct,
            host_copies.transfer_kv_all_layer_direct_lf_pf,
            host_copies.transfer_kv_per_layer_direct_pf_lf,
        )
    ),
    Patch(
        "sglang.srt.disaggregation.nixl.conn",
        "NixlKVManager.__init__",
        transfer.over_host_memory,
        "registers every buffer as memory of a GPU",
    ),
    Patch("sglang.srt.disaggregation.prefill", "torch", _torch_with_host_events, "waits for an event of CUDA's"),
    Patch(f"{_HOST_POOLS}.common", "_cuda_host_register", _value(_nothing), _NO_PIN),
    Patch(
        f"{_HOST_POOLS}.base",
        "HICACHE_HOST_MEMORY_RESERVE_BYTES",
        _value(0),
        "leaves 10 GB of the host's memory to others, where the pools themselves are in it",
    ),
    Patch("sglang.srt.mem_cache.memory_pool", "torch", _host_torch, "0.5.17 allocates snapshots on 'cuda'"),
    Patch("sglang.srt.managers.overlap_utils", "torch", _host_torch, _NO_PIN),
    Patch("sglang.srt.managers.utils", "torch", _host_torch, _NO_PIN),
    Patch("sglang.srt.managers.schedule_batch", "torch", _host_torch, _NO_PIN),
    Patch("sglang.srt.constrained.xgrammar_backend", "torch", _host_torch, _NO_PIN),
    Patch("sglang.srt.model_executor.forward_batch_info", "torch", _host_torch, _NO_PIN),
    Patch("sglang.srt.lora.layers", "torch", _host_torch, _NO_PIN),
    Patch("sglang.srt.lora.backend.torch_backend", "torch", _host_torch, _NO_PIN),
    Patch("sglang.kernels.ops.memory.memcpy_triton", "memcpy_triton", _value(parallel_ops.memcpy_cpu), "Triton"),
    Patch(_RANKS, "reg_all_gather_into_tensor", _value(parallel_ops.all_gather_into_tensor), "an operation of CUDA's"),
    Patch(_RANKS, "reg_reduce_scatter_tensor", _value(parallel_ops.reduce_scatter_tensor), "an operation of CUDA's"),
    Patch(
        "sglang.srt.server_args",
        "ServerArgs._validate_mamba_extra_buffer",
        while_calling("sglang.srt.server_args", is_hip=lambda: True),
        _EXTRA_BUFFER,
        True,
    ),
    Patch(
        "sglang.srt.arg_groups.mamba_hook",
        "validate_mamba_extra_buffer",
        while_calling("sglang.srt.arg_groups.mamba_hook", get_platform=_hip_platform),
        _EXTRA_BUFFER,
        True,
    ),
    Patch(
        "sglang.srt.arg_groups.mamba_hook",
        "_platform_supports_mamba_cache_extra_buffer",
        _value(lambda: True),
        _EXTRA_BUFFER,
        True,
    ),
)


def _apply(patch: Patch, module: ModuleType) -> None:
    *path, name = patch.attribute.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    if not hasattr(owner, name) and not patch.create:
        if patch.optional:
            return
        raise AttributeError(f"{patch.target} is gone: this SGLang is not one sglang_mamba_mtp.cpu knows")
    current = getattr(owner, name, None)
    new = patch.make(current)
    setattr(owner, name, new)
    if callable(current) and not path and name != "torch":
        rebind(current, new)


def apply_all() -> list[str]:
    """Apply every patch, now or when its module comes. Returns `target: reason` lines."""
    for owner, name, new in (
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "set_device", _no_device_to_set),
        (torch.Tensor, "pin_memory", _unpinned),
        (torch.Tensor, "record_stream", _nothing),
        (torch, "get_device_module", functools.partial(_device_module, torch.get_device_module)),
    ):
        setattr(owner, name, new)
    for patch in PATCHES:
        when_imported(patch.module, functools.partial(_apply, patch))
    lines = [f"{patch.target}: {patch.reason}" for patch in PATCHES]
    return [
        *lines,
        "torch.cuda.synchronize: no device to wait for",
        "torch.cuda.set_device: a scheduler that is a Ray actor chooses one",
        f"torch.Tensor.pin_memory: {_NO_PIN}",
        "torch.Tensor.record_stream: refuses CPU streams; host memory needs no recording",
        "torch.get_device_module: without an argument it means CUDA in a CUDA build, and then initialises it",
    ]


def _device_module(original: Callable[..., Any], device: Any = None) -> Any:
    return original("cpu" if device is None else device)


def _unpinned(self: torch.Tensor, *_args: object) -> torch.Tensor:
    """Memory is only pinned for copies to a device."""
    return self
