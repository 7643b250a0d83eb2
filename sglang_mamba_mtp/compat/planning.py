"""SGLang's own sizing of memory for a server that is not started: no GPU, no weights, no processes.

The formulas are SGLang's: its `ServerArgs` resolve the settings, its `KVCacheConfigurator` turns bytes into state
slots, KV tokens and requests. Only what it would measure, the memory there is, is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..cpu.dflash import as_on_a_gpu
from ..errors import MtpError
from . import startup


@dataclass(frozen=True)
class Setting:
    """What decides how memory is divided.

    Attributes
        model: folder or name of the model, of which config.json is read.
        ranks: tensor-parallel ranks.
        strategy: of the radix cache (``no_buffer``, ``extra_buffer``, ``extra_buffer_lazy``), or None without one.
        slots_per_request: state slots of a running request; None: as SGLang has it with that strategy.
        overlap: whether scheduling overlaps with forwards; SGLang refuses it with ``no_buffer``.
        algorithm: of drafting, or None; ``nodes``, ``steps`` and ``topk`` describe its trees, ``draft`` is folder or
            name of its model, where it has one.
        replayssm: ``--enable-linear-replayssm-spec``.
        max_requests: ``--max-running-requests``.
        dtype: of activations and KV cache; "auto" as the model says.
        state_dtype: ``--mamba-ssm-dtype``; None as the model says.
        context: ``--context-length``; None as the model says.
        memory_ratio: ``--mamba-full-memory-ratio``; None for SGLang's default.
        trust_remote_code: as SGLang's flag.
    """

    model: str
    ranks: int = 1
    strategy: str | None = "extra_buffer"
    slots_per_request: int | None = None
    overlap: bool = True
    algorithm: str | None = None
    draft: str | None = None
    nodes: int = 4
    steps: int | None = None
    topk: int = 1
    replayssm: bool = False
    max_requests: int = 4096
    dtype: str = "auto"
    state_dtype: str | None = None
    context: int | None = None
    memory_ratio: float | None = None
    trust_remote_code: bool = False

    def arguments(self) -> dict[str, Any]:
        """As `ServerArgs` take them; ranks and sizes that SGLang would look up a device for are set afterwards."""
        arguments: dict[str, Any] = {
            "model_path": self.model,
            "device": "cpu",
            "dtype": self.dtype,
            "skip_tokenizer_init": True,
            "max_running_requests": self.max_requests,
            "mamba_ssm_dtype": self.state_dtype,
            "context_length": self.context,
            "trust_remote_code": self.trust_remote_code,
            "disable_overlap_schedule": not self.overlap,
        }
        if self.strategy is None:
            arguments["disable_radix_cache"] = True
        else:
            arguments["mamba_radix_cache_strategy"] = self.strategy
        if self.algorithm is not None:
            arguments |= {
                "speculative_algorithm": self.algorithm,
                "speculative_num_draft_tokens": self.nodes,
                "speculative_draft_model_path": self.draft,
            }
        if self.algorithm not in (None, "NGRAM", "DFLASH"):
            arguments |= {
                "speculative_num_steps": steps(self.nodes, self.steps),
                "speculative_eagle_topk": self.topk,
            }
        return arguments


def steps(nodes: int, given: int | None) -> int:
    """Forwards of a draft of ``nodes``: as ``given``, or those of a chain."""
    return max(1, nodes - 1) if given is None else given


@contextlib.contextmanager
def configurator(setting: Setting) -> Iterator[Any]:
    """SGLang's `KVCacheConfigurator` as the first rank of a server with this setting has it, less its device.

    Raises
        MtpError: SGLang refuses the setting; the message is its own.
    """
    context = importlib.import_module("sglang.srt.runtime_context")
    with _environment_restored():
        try:
            server_args = _resolved_args(setting)
        except (ValueError, AssertionError, OSError, NotImplementedError) as error:
            raise MtpError(f"SGLang refuses this: {str(error) or type(error).__name__}") from error
        _publish(context, server_args)
        settled: dict[str, Any] = {
            # What the CPU, or the search for a GPU, would have decided.
            "max_running_requests": setting.max_requests,
            "max_total_tokens": None,
            "max_mamba_cache_size": None,
            "disable_overlap_schedule": not setting.overlap,
            "enable_linear_replayssm_spec": setting.replayssm,
        }
        if setting.memory_ratio is not None:
            settled["mamba_full_memory_ratio"] = setting.memory_ratio
        context.get_context().override("mamba_mtp.advise", **settled)
        ranks = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), setting.ranks)
        with context.get_parallel().override(**ranks, **_others(context)):
            yield _build(server_args, setting.slots_per_request)


def _others(context: Any) -> dict[str, int]:
    """Parallel sizes that live groups would tell."""
    known = {"attn_dp_size": 1, "pp_size": 1, "world_size": 1, "attn_cp_size": 1, "dcp_enabled": False}
    known |= {"attn_dcp_size": 1, "moe_ep_size": 1}
    if hasattr(context.ParallelContext, "override_permanently"):  # later versions know them without groups
        return {}
    return known


def _resolved_args(setting: Setting) -> Any:
    from sglang.srt.server_args import ServerArgs

    with _blocks_are_drafted_anywhere():
        server_args = ServerArgs(**setting.arguments())
        if hasattr(server_args, "resolve_once"):
            server_args.resolve_once()
    return server_args


@contextlib.contextmanager
def _blocks_are_drafted_anywhere() -> Iterator[None]:
    """SGLang refuses DFLASH for the device that the arguments name here, whatever the machine has."""
    module: Any = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    stock = module._handle_dflash
    module._handle_dflash = as_on_a_gpu(stock)
    try:
        yield
    finally:
        module._handle_dflash = stock


def _publish(context: Any, server_args: Any) -> None:
    placement = {}
    if "ranks" in inspect.signature(context.publish).parameters:
        placement["ranks"] = context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    context.publish(server_args, role="scheduler", **placement)


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    """`ServerArgs` export some of their fields, the dtype of states among them."""
    before = dict(os.environ)
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")  # SGLang's default, which `cpu.defaults` changes
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _build(server_args: Any, slots_per_request: int | None) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components import layer_setup, spec_aux_hidden_state
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    args = startup.resolved(server_args)
    model_config = ModelConfig.from_server_args(server_args)
    algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    layers = model_config.num_hidden_layers
    values = {
        "device": "cpu",
        "gpu_id": 0,
        "ps": SimpleNamespace(attn_dp_size=1, pp_size=1),
        "attn_dp_size": 1,
        "pp_size": 1,
        "model_config": model_config,
        "server_args": server_args,
        "kv_cache_dtype": model_config.dtype,
        "kv_cache_dtype_str": "auto",
        "model_dtype": model_config.dtype,
        "page_size": args.page_size,
        "spec_algorithm": algorithm,
        "is_draft_worker": False,
        "post_capture_kv_active": False,
        "spec_aux_config": spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
            server_args=server_args, model_config=model_config, spec_algorithm=algorithm, is_draft_worker=False
        ),
        "is_hybrid_swa": False,
        "is_hybrid_swa_compress": False,
        "use_mla_backend": False,
        "layer_info": layer_setup.ModelLayerInfo(start_layer=0, end_layer=layers, num_effective_layers=layers),
    }
    fields = [field for field in dataclasses.fields(KVCacheConfigurator) if field.init]
    needed = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    kind: Any = KVCacheConfigurator
    if slots_per_request is not None:
        kind = type("Configurator", (kind,), {"_calculate_mamba_ratio": lambda self: slots_per_request})
    return kind(
        **{field.name: values.get(field.name) for field in fields if field.name in values or field.name in needed}
    )
