"""What the plugin expects of SGLang: every function it patches, overrides or calls, with the parameters known to it.

SGLang is imported inside functions only: `env_report` must be able to load this module where SGLang is missing.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import MtpError
from ..names import GDN, MAMBA2
from .version import version_numbers


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

_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter"

_KVC = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator"


def _mamba_component() -> str:
    """Where the radix cache's mamba component lives: the module was renamed after 0.5.17."""
    package = "sglang.srt.mem_cache.unified_cache.components"
    old = version_numbers() <= (0, 5, 17)
    return f"{package}.{'mamba_component' if old else 'mamba'}:MambaComponent"


#: Surfaces that the hooks patch, by a short name.
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
    "release": Surface(
        "sglang.srt.mem_cache.common:release_kv_cache",
        (("req", "tree_cache", "is_insert"), ("req", "tree_cache", "checkpoint")),
    ),
    "lazy_prepare": _same(
        "sglang.srt.managers.schedule_batch:ScheduleBatch.mamba_lazy_spec_prepare",
        "self mamba_track_interval max_draft_tokens",
    ),
    "track_indices": _same(
        "sglang.srt.managers.schedule_batch:set_mamba_track_indices_from_reqs", "batch track_positions"
    ),
    "metrics_reporter": _same(f"{_REPORTER}.__post_init__", "self"),
    "report_decode_stats": Surface(
        f"{_REPORTER}.report_decode_stats",
        (
            ("self", "can_run_cuda_graph", "running_batch", "num_correct_drafts"),
            ("self", "can_run_cuda_graph", "running_batch", "num_generated_tokens"),
        ),
    ),
    "log_stats": _same("sglang.srt.observability.metrics_collector:SchedulerMetricsCollector.log_stats", "self stats"),
    "internal_state": _same("sglang.srt.managers.scheduler:Scheduler.get_internal_state", "self recv_req"),
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


def backend_name(family: str) -> tuple[ModuleType, str]:
    """The module and the name by which `attn_backend_wrapper` imports the backend of ``family``."""
    path, name = {GDN: (_GDN, "GDNAttnBackend"), MAMBA2: (_HL, "Mamba2AttnBackend")}[family]
    return importlib.import_module(path), name
