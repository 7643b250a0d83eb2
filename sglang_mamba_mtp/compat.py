"""Everything that differs between the supported SGLang versions, and what we expect of the surfaces we touch.

SGLang is imported inside functions only: `env_report` must be able to load this module where SGLang is missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import MtpError
from .modes import GDN, MAMBA2

SUPPORTED_MIN = (0, 5, 17)
SUPPORTED_BELOW = (0, 5, 24)
SUPPORTED = "sglang >=0.5.17,<0.5.24"


# ---------------------------------------------------------------------------------------------------------- version


def sglang_version() -> str | None:
    """The installed SGLang's version, or None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of ``version`` (suffixes such as ``.post1`` or ``+cu130`` do not matter), or ()."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return () if match is None else tuple(int(part) for part in match.groups())


def version_numbers() -> tuple[int, ...]:
    """The installed SGLang's; the oldest supported where there is none (kernels are also used without SGLang)."""
    version = sglang_version()
    return SUPPORTED_MIN if version is None else numbers(version)


def has_external_cache_linker() -> bool:
    """Whether SGLang has `--enable-unified-cache-external-linker`."""
    return version_numbers() >= (0, 5, 23)


def is_supported(version: str) -> bool:
    """Whether ``version`` lies in the supported range."""
    return SUPPORTED_MIN <= numbers(version) < SUPPORTED_BELOW


def require_supported_version() -> str:
    """Return SGLang's version.

    Raises
        MtpError: SGLang is missing or outside the supported range.
    """
    version = sglang_version()
    if version is None:
        raise MtpError(f"SGLang is not installed; this plugin needs {SUPPORTED}")
    if not is_supported(version):
        raise MtpError(
            f"SGLang {version} is installed; this plugin supports {SUPPORTED}. Install a supported version, or "
            f"uninstall sglang-mamba-mtp (or leave it out of SGLANG_PLUGINS) to serve without it"
        )
    return version


# ---------------------------------------------------------------------------------------------------------- surfaces


@dataclass(frozen=True)
class Surface:
    """A function or method of SGLang that we wrap, override or call.

    Attributes
        path: ``module:qualname``.
        parameters: the parameter lists known to us, oldest first; the surface must have exactly one of them.
    """

    path: str
    parameters: tuple[tuple[str, ...], ...]

    @property
    def dotted(self) -> str:
        """The spelling SGLang's hook registry takes."""
        return self.path.replace(":", ".")

    def resolve(self) -> tuple[Any, str, Any]:
        """Return ``(owner, name, raw attribute)``; the attribute is not bound, a classmethod stays a classmethod.

        Raises
            MtpError: the module or the attribute does not exist.
        """
        module_name, _, qualname = self.path.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise MtpError(f"SGLang has no module {module_name} that can be imported ({error})") from error
        *parents, name = qualname.split(".")
        for parent in parents:
            try:
                owner = getattr(owner, parent)
            except AttributeError:
                raise MtpError(f"SGLang has no {parent} in {module_name} (wanted: {self.path})") from None
        try:
            return owner, name, inspect.getattr_static(owner, name)
        except AttributeError:
            raise MtpError(f"SGLang has no {name} in {self.path.rpartition('.')[0] or module_name} any more") from None

    def check(self) -> None:
        """Check that the surface exists and takes the parameters we expect.

        Raises
            MtpError: it does not; the message shows both lists.
        """
        _, _, attribute = self.resolve()
        if isinstance(attribute, (classmethod, staticmethod)):
            attribute = attribute.__func__
        found = tuple(inspect.signature(attribute).parameters)
        if found not in self.parameters:
            expected = " or ".join(f"({', '.join(known)})" for known in self.parameters)
            raise MtpError(f"{self.path} takes ({', '.join(found)}); expected {expected}")


def _same(path: str, parameters: str) -> Surface:
    return Surface(path, (tuple(parameters.split()),))


_HL = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_GDN = "sglang.srt.layers.attention.linear.gdn_backend"

_KVC = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator"


def _mamba_component() -> str:
    """Where the radix cache's mamba component lives: the module was renamed after 0.5.17."""
    package = "sglang.srt.mem_cache.unified_cache.components"
    old = version_numbers() <= (0, 5, 17)
    return f"{package}.{'mamba_component' if old else 'mamba'}:MambaComponent"


#: Surfaces the hook table patches, by a short name.
HOOKED: dict[str, Surface] = {
    "add_cli_args": _same("sglang.srt.server_args:ServerArgs.add_cli_args", "parser"),
    "from_cli_args": _same("sglang.srt.server_args:ServerArgs.from_cli_args", "cls args"),
    "check_server_args": _same("sglang.srt.server_args:ServerArgs.check_server_args", "self"),
    "handle_ngram": _same("sglang.srt.arg_groups.speculative_hook:_handle_ngram", "server_args"),
    "prepare_for_extend": _same("sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_extend", "self"),
    "track_entry": _same(
        "sglang.srt.managers.schedule_batch:ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend", "self req"
    ),
    "attn_backend_wrapper": _same(
        "sglang.srt.layers.attention.attention_registry:attn_backend_wrapper", "runner full_attn_backend"
    ),
    "init_attention_backends": _same(
        "sglang.srt.model_executor.model_runner:ModelRunner.init_attention_backends", "self"
    ),
    "build_request_pool": _same(f"{_KVC}._build_hybrid_req_pool", "self max_num_reqs extra_max_context_len"),
    "size_mamba_pool": _same(f"{_KVC}._handle_max_mamba_cache", "self total_rest_memory"),
    "prepare_for_caching": _same(
        f"{_mamba_component()}.prepare_for_caching_req", "self req insert_params token_ids_len is_finished"
    ),
    "accept_grammar": _same(
        "sglang.srt.managers.scheduler_components.batch_result_processor:"
        "SchedulerBatchResultProcessor._accept_grammar_tokens",
        "self req tokens",
    ),
    "prefill_result": _same(
        "sglang.srt.managers.scheduler_components.batch_result_processor:"
        "SchedulerBatchResultProcessor.process_batch_result_prefill",
        "self batch result",
    ),
    "lazy_prepare": _same(
        "sglang.srt.managers.schedule_batch:ScheduleBatch.mamba_lazy_spec_prepare",
        "self mamba_track_interval max_draft_tokens",
    ),
    "track_indices": _same(
        "sglang.srt.managers.schedule_batch:set_mamba_track_indices_from_reqs", "batch track_positions"
    ),
    "plan_stream": _same("sglang.srt.speculative.spec_utils:get_plan_stream", "device"),
    "commit": _same(
        f"{_HL}:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "self last_correct_step_indices mamba_track_indices mamba_steps_to_track model req_pool_indices",
    ),
}

#: Surfaces the backends override or call: not patched, but they must be what we think they are.
RELIED_ON: tuple[Surface, ...] = (
    _same(f"{_HL}:MambaAttnBackendBase.__init__", "self model_runner"),
    _same(f"{_HL}:MambaAttnBackendBase._forward_metadata", "self forward_batch"),
    _same(f"{_HL}:MambaAttnBackendBase.update_verify_buffers_to_fill_after_draft", "self spec_info cuda_graph_bs"),
    _same(f"{_HL}:Mamba2AttnBackend.__init__", "self model_runner"),
    _same(f"{_HL}:Mamba2AttnBackend.init_forward_metadata", "self forward_batch"),
    _same(
        f"{_HL}:Mamba2AttnBackend.forward",
        "self mixer hidden_states output layer_id forward_batch mup_vector use_triton_causal_conv",
    ),
    _same(f"{_GDN}:GDNAttnBackend.__init__", "self model_runner"),
    _same(f"{_GDN}:GDNAttnBackend.init_forward_metadata", "self forward_batch"),
    _same(
        "sglang.srt.layers.attention.mamba.mamba2_metadata:Mamba2Metadata.prepare_mixed",
        "cls forward_metadata chunk_size forward_batch",
    ),
    _same(
        "sglang.srt.layers.attention.linear.kernels.gdn_flashinfer:maybe_build_flashinfer_checkpoint_plan",
        "forward_batch forward_metadata device",
    ),
)


# -------------------------------------------------------------------------------------------------- server arguments


def resolved(server_args: Any) -> Any:
    """A read-only view of ``server_args`` with every decision SGLang has taken so far."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def decide(server_args: Any, source: str, **fields: Any) -> None:
    """Set resolved values while SGLang resolves its arguments.

    Up to 0.5.17 resolution writes to the record itself; later the record is sealed and decisions are declared.
    """
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    declare = getattr(overrides, "declare_resolution", None)
    if declare is not None:
        declare(server_args, source, **fields)
        return
    for name, value in fields.items():
        setattr(server_args, name, value)


def model_config(server_args: Any) -> Any | None:
    """SGLang's `ModelConfig` of the target model, or None if no model is named."""
    if str(resolved(server_args).model_path).lower() in ("none", "dummy"):
        return None
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


# ------------------------------------------------------------------------------------------------------ model family


def linear_family(config: Any) -> tuple[str | None, str]:
    """Which linear-attention backend SGLang builds for a `ModelConfig`.

    Returns
        ``(family, name)``: family `GDN`, `MAMBA2`, or None where this plugin has no backend; the name is for people
        ("dense", "KDA", ...).
    """
    from sglang.srt.configs import hybrid_arch

    gdn = hybrid_arch.hybrid_gdn_config(config)
    if gdn is not None:
        name = type(gdn).__name__
        if name.startswith("Jet"):  # its layers convolve and update states themselves, and know no verify
            return None, "Jet block"
        if name.startswith("Qwen4Exp"):  # short-convolution and n-gram states beside GDN's, which SGLang's commit moves
            return None, "GDN with further states"
        return GDN, "GDN"
    mamba2 = hybrid_arch.mamba2_config(config)
    if mamba2 is not None:
        name = type(mamba2).__name__
        if name in ("Mamba2Config", "MambaConfig", "FalconMambaConfig"):
            return None, "pure Mamba"
        if name.startswith(("Lfm2", "Zaya", "Inkling")):
            return None, "short convolution"
        return MAMBA2, "Mamba2"
    kda = getattr(hybrid_arch, "hybrid_kda_config", hybrid_arch.kimi_linear_config)
    if kda(config) is not None:
        return None, "KDA"
    if hybrid_arch.hybrid_lightning_config(config) is not None:
        return None, "lightning attention"
    if hybrid_arch.mambaish_config(config) is not None:
        return None, "a registered linear-attention model"
    return None, "dense"


# ---------------------------------------------------------------------------------------------------- prefill tracking

#: Where a prefill kernel leaves the states at chunk boundaries (`h`), as the row arithmetic of the snapshots needs it.
PER_SEQUENCE = "per_sequence"  # ceil(len / chunk) states a sequence, one sequence after the other
PER_SEQUENCE_FLOOR = "per_sequence_floor"  # floor(len / chunk) states a sequence (Mamba2 up to 0.5.17)
FLAT_GRID = "flat_grid"  # one grid over the whole flattened batch; states off it are recomputed (Mamba2 later)


@functools.cache
def boundary_states(family: str) -> str:
    """How `h` is laid out for ``family`` in the installed version."""
    if family == GDN:
        return PER_SEQUENCE
    metadata = importlib.import_module("sglang.srt.layers.attention.mamba.mamba2_metadata")
    return FLAT_GRID if "track_ssm_recompute_dst" in _field_names(metadata.ForwardMetadata) else PER_SEQUENCE_FLOOR


def snapshot_size() -> int:
    """Tokens between two places the prefix cache snapshots at: the model's chunk size or the page size."""
    context = importlib.import_module("sglang.srt.runtime_context")
    if hasattr(context, "mamba_cache_chunk_size"):
        return int(context.mamba_cache_chunk_size())
    return int(context.get_server_args().mamba_cache_chunk_size)


def track_chunk_size(backend: Any) -> int:
    """Tokens between two boundary states of ``backend``'s prefill kernels, as SGLang takes it.

    Up to 0.5.17 it takes the snapshot size, which is not the kernels' where a page is larger than a chunk.
    """
    if hasattr(type(backend), "mamba_chunk_size"):
        return int(backend.mamba_chunk_size)
    return snapshot_size()


@dataclass(frozen=True)
class HostTracking:
    """What a prefill batch snapshots for the prefix cache, on the host.

    Attributes
        mask: per row, whether it is tracked.
        seqlens: per row, the sequence length to snapshot at (SGLang's convention; meaningless where not tracked).
    """

    mask: Sequence[bool]
    seqlens: Sequence[int]


_HOST_COPY = "_mamba_mtp_host"


@functools.cache
def schedule_batch_has_host_tracking() -> bool:
    """Whether SGLang itself carries the host copies from the scheduler to the forward (0.5.17 does not)."""
    module = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    return "mamba_prefill_track_mask_cpu" in _field_names(module.ForwardBatch)


def attach_host_tracking(batch: Any, tracking: HostTracking) -> None:
    """Let the host copy travel on the very tensor it mirrors.

    Whoever replaces or clears ``batch.mamba_track_mask`` (merge, filter, decode) thereby drops the copy, so it cannot
    go stale.
    """
    if batch.mamba_track_mask is not None and batch.mamba_track_mask.shape[0] == len(tracking.mask):
        setattr(batch.mamba_track_mask, _HOST_COPY, tracking)


def host_tracking(forward_batch: Any) -> HostTracking | None:
    """The host copy of a `ForwardBatch`'s tracking, or None if there is none."""
    mask = getattr(forward_batch, "mamba_prefill_track_mask_cpu", None)
    seqlens = getattr(forward_batch, "mamba_track_seqlens_cpu", None)
    if mask is not None and seqlens is not None and len(mask) == len(seqlens):
        return HostTracking(mask=mask, seqlens=seqlens)
    return getattr(forward_batch.mamba_track_mask, _HOST_COPY, None)


#: Attributes of a `ForwardBatch` that make SGLang compute tracking indices itself.
TRACKING_ATTRIBUTES = ("mamba_track_mask", "mamba_prefill_track_mask_cpu")


def _field_names(record: type) -> set[str]:
    return set(inspect.get_annotations(record)) | set(getattr(record, "__dataclass_fields__", ()))


# ---------------------------------------------------------------------------------------------------------- modules


def backend_name(family: str) -> tuple[ModuleType, str]:
    """The module and the name by which `attn_backend_wrapper` imports the backend of ``family``."""
    path, name = {GDN: (_GDN, "GDNAttnBackend"), MAMBA2: (_HL, "Mamba2AttnBackend")}[family]
    return importlib.import_module(path), name


# ------------------------------------------------------------------------------------------------------- memory pools


def request_slot(req: Any) -> Any:
    """The state slot of a request (0-dim tensor), or None."""
    return req.mamba_pool_idx if hasattr(req, "mamba_pool_idx") else req.kv.mamba_pool_idx


def tracking_of(req: Any) -> Any:
    """Where a request keeps its snapshot slots (``mamba_ping_pong_track_buffer``) and what they hold."""
    return req if hasattr(req, "mamba_ping_pong_track_buffer") else req.kv


def committed(req: Any) -> Any:
    """Where a request keeps how many of its tokens are in the KV cache and the state (``kv_committed_len``)."""
    return req if hasattr(req, "kv_committed_len") else req.kv


def finds_older_snapshots(component: Any) -> bool:
    """Whether the radix cache itself looks for a finished request's newest snapshot within its key (not in 0.5.17)."""
    return hasattr(component, "_select_finished_checkpoint")


def may_cross_track_boundary(req: Any, interval: int, max_nodes: int) -> bool:
    """Whether a verify in flight may take ``req`` past a multiple of ``interval``, as SGLang counts it."""
    module = importlib.import_module("sglang.srt.managers.schedule_batch")
    return bool(module.mamba_lazy_spec_in_window(req, interval, max_nodes))


def hybrid_request_pool() -> Any:
    """SGLang's `HybridReqToTokenPool`, whose ``mamba_pool_cls`` names the mamba pool it builds."""
    return importlib.import_module("sglang.srt.mem_cache.memory_pool").HybridReqToTokenPool


def cache_params(model_config: Any) -> Any:
    """The `Mamba2CacheParams` of a hybrid model: state shapes per rank, dtypes and layers."""
    from sglang.srt.configs import hybrid_arch

    return hybrid_arch.mambaish_config(model_config).mamba2_cache_params


def largest_draft(server_args: Any) -> int:
    """The most draft nodes a verify may have, adaptive speculation included."""
    spec_utils = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    largest = getattr(spec_utils, "max_speculative_num_draft_tokens", None)
    return int(largest() if largest is not None else server_args.max_speculative_num_draft_tokens)


def _configurator_module() -> Any:
    return importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")


def schedule() -> Any:
    """SGLang's resolved scheduling settings, as `KVCacheConfigurator` reads them."""
    return _configurator_module().get_schedule()


def state_slots_are_automatic() -> bool:
    """Whether SGLang derives the number of state slots from memory, not from a flag. Ask before it is derived."""
    return schedule().max_mamba_cache_size is None and not _configurator_module().get_memory().disable_radix_cache


def set_state_slots(slots: int) -> None:
    """Settle the number of state slots, as `KVCacheConfigurator` does."""
    _configurator_module().get_context().override("mamba_mtp.memory_budget", max_mamba_cache_size=slots)


def request_rows(configurator: Any) -> int:
    """The most requests that run at a time on one data-parallel rank."""
    ranks = configurator.ps.attn_dp_size if hasattr(configurator, "ps") else configurator.attn_dp_size
    return max(1, int(schedule().max_running_requests) // int(ranks))
