"""What differs between SGLang's versions while a server starts: arguments, the model, the sizes of its pools."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
from collections.abc import Iterator
from typing import Any

from ..costs.weights import ModelSize, model_size
from ..names import GDN, MAMBA2
from .version import version_numbers

# -------------------------------------------------------------------------------------------------- server arguments


def resolved(server_args: Any) -> Any:
    """A read-only view of ``server_args`` with every decision SGLang has taken so far."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def decide(server_args: Any, source: str, **fields: Any) -> None:
    """Set resolved values while SGLang resolves its arguments.

    Up to 0.5.18 resolution writes to the record itself; later the record is sealed and decisions are declared.
    """
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    declare = getattr(overrides, "declare_resolution", None)
    if declare is not None:
        declare(server_args, source, **fields)
        return
    for name, value in fields.items():
        setattr(server_args, name, value)


def radix_strategy(server_args: Any) -> str:
    """SGLang's name of how the radix cache gets states, or "off"."""
    args = resolved(server_args)
    return "off" if args.disable_radix_cache else str(args.mamba_radix_cache_strategy)


def page_size(server_args: Any) -> int:
    """Tokens of a page of the KV cache, and so of the radix cache's keys."""
    return int(resolved(server_args).page_size or 1)


def snapshot_interval(server_args: Any) -> int:
    """Tokens between two snapshots of a request that decodes: as asked for, and from 0.5.19 on whole chunks and pages
    too."""
    interval = int(resolved(server_args).mamba_track_interval)
    if not hasattr(importlib.import_module("sglang.srt.runtime_context"), "mamba_track_grid"):
        return interval
    chunk = importlib.import_module("sglang.srt.arg_groups.overrides").mamba_cache_chunk_size(server_args)
    return math.lcm(int(chunk), page_size(server_args), interval)


def chooses_radix_strategy(server_args: Any) -> bool:
    """Whether ``--mamba-radix-cache-strategy`` was left to SGLang.

    A decision of its own is declared, whether or not the argument still says what was asked for (up to 0.5.18 it does
    not).
    """
    declared = getattr(server_args, "_resolved_overrides", None) or ()
    return any("mamba_radix_cache_strategy" in fields for _, fields in declared)


def may_choose_radix_strategy(server_args: Any) -> bool:
    """Whether the model is one that SGLang chooses a strategy for where none is given."""
    return bool(resolved(server_args).uses_mamba_radix_cache)


def only_prefills(server_args: Any) -> bool:
    """Whether this is the prefill server of a pair, which hands requests on before their first verify."""
    return str(resolved(server_args).disaggregation_mode) == "prefill"


def only_decodes(server_args: Any) -> bool:
    """Whether this is the decode server of a pair."""
    return str(resolved(server_args).disaggregation_mode) == "decode"


def rows_in_transfer(server_args: Any) -> int:
    """Request rows that a decode server has beside those of the most requests that run: for requests whose states are
    still on their way."""
    args = resolved(server_args)
    return int(args.disaggregation_decode_extra_slots or 0) if only_decodes(server_args) else 0


def skip_decode_locks() -> None:
    """Leave the states of prefixes that running requests have already copied to eviction, as SGLang does where
    SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK is set, unless the operator has decided about it."""
    os.environ.setdefault("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", "1")


def derived_verify_backend(server_args: Any) -> str | None:
    """What SGLang lets the linear layers verify with; None where ``--linear-attn-verify-backend`` names it."""
    args = resolved(server_args)
    if args.linear_attn_verify_backend is not None:
        return None
    decode = args.linear_attn_decode_backend or args.linear_attn_backend
    return "flashinfer" if decode == "flashinfer" else "triton"


def glues_metadata() -> bool:
    """Whether SGLang replays a captured graph in place of a forward's preparation (0.5.23 can, by a variable)."""
    setting = getattr(importlib.import_module("sglang.srt.environ").envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH", None)
    return setting is not None and bool(setting.get())


def hip_version() -> str | None:
    """The ROCm release PyTorch was built for, whose devices SGLang calls `cuda`; None with NVIDIA's."""
    import torch

    return torch.version.hip


def longest_adaptive_chain(path: str | None) -> int:
    """The most draft nodes of adaptive speculation with the settings in the file ``path`` (None: SGLang's own)."""
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    return 1 + max(resolve_candidate_steps_from_config(cfg_path=path))


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


def model_class(server_args: Any) -> type:
    """SGLang's class for the target model."""
    from sglang.srt.model_loader.utils import get_model_architecture

    kind, _ = get_model_architecture(model_config(server_args))
    return kind


def hides_inner_states(server_args: Any) -> str | None:
    """The class of the target model where it has nothing to hand the states of its inner layers out with, as a draft of
    DFLASH wants them; else None."""
    kind = model_class(server_args)
    return None if hasattr(kind, "set_dflash_layers_to_capture") else kind.__name__


# ------------------------------------------------------------------------------------------------------ memory pools


def hybrid_request_pool() -> Any:
    """SGLang's `HybridReqToTokenPool`, whose ``mamba_pool_cls`` names the mamba pool it builds."""
    return importlib.import_module("sglang.srt.mem_cache.memory_pool").HybridReqToTokenPool


@contextlib.contextmanager
def request_pool_built_as(requests: type) -> Iterator[None]:
    """`KVCacheConfigurator` finds ``requests`` where it looks for `HybridReqToTokenPool`."""
    module = _configurator_module()
    stock = module.HybridReqToTokenPool
    module.HybridReqToTokenPool = requests
    try:
        yield
    finally:
        module.HybridReqToTokenPool = stock


def cache_params(model_config: Any) -> Any:
    """The `Mamba2CacheParams` of a hybrid model: state shapes per rank, dtypes and layers."""
    from sglang.srt.configs import hybrid_arch

    return hybrid_arch.mambaish_config(model_config).mamba2_cache_params


def checkpoint_bytes_of_a_slot(configurator: Any) -> int:
    """Bytes of the int8 checkpoints that SGLang adds for a state slot, outside of the memory that it divides; 0 where
    it keeps none, or a number of its own (``--int8-mamba-ckpt-size``)."""
    args = resolved(configurator.server_args)
    if not args.enable_int8_mamba_checkpoint or args.int8_mamba_ckpt_size:
        return 0
    pool = importlib.import_module("sglang.srt.mem_cache.mamba_checkpoint_pool").MambaCheckpointPool
    params = cache_params(configurator.model_config)
    heads, head_v_dim, head_k_dim = params.shape.temporal

    def estimate(places: int) -> int:
        sizes = pool.estimate_mem_usage_bytes(
            num_layers=len(params.layers),
            num_slots=places,
            num_heads=heads,
            head_v_dim=head_v_dim,
            head_k_dim=head_k_dim,
            conv_shapes=list(params.shape.conv),
            conv_dtype=params.dtype.conv,
            temporal_dtype=params.dtype.temporal,
        )
        return int(sizes["total"])

    return estimate(2) - estimate(0)


def largest_draft(server_args: Any) -> int:
    """The most draft nodes a verify may have, adaptive speculation included."""
    spec_utils = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    largest = getattr(spec_utils, "max_speculative_num_draft_tokens", None)
    return int(largest() if largest is not None else server_args.max_speculative_num_draft_tokens)


def draft_lengths(server_args: Any) -> list[int]:
    """How many draft nodes a verify may have: one number, or with adaptive speculation several."""
    args = resolved(server_args)
    lengths = {int(args.speculative_num_draft_tokens)}
    if args.speculative_adaptive:
        params = importlib.import_module("sglang.srt.speculative.adaptive_spec_params")
        steps = params.resolve_candidate_steps_from_config(cfg_path=args.speculative_adaptive_config)
        lengths |= {step + 1 for step in steps}
    return sorted(lengths)


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


def stock_slots_per_request(configurator: Any) -> int:
    """State slots that SGLang would reserve for every running request."""
    hooked = configurator._calculate_mamba_ratio
    stock = inspect.unwrap(hooked)
    return int(hooked() if stock is hooked else stock(configurator))


def slots_per_request(runner: Any) -> int:
    """State slots that are reserved for every running request of a `ModelRunner`."""
    return int(runner.kv_cache_configurator._calculate_mamba_ratio())


# --------------------------------------------------------------------------------------------------------- model size


def size_of_model(model_config: Any) -> ModelSize:
    """The parameters of a hybrid model.

    Raises
        ValueError: a size is under no name known here.
    """
    from sglang.srt.configs import hybrid_arch

    hybrid = hybrid_arch.mambaish_config(model_config)
    return model_size(
        hybrid,
        attention_layers=len(hybrid.full_attention_layer_ids),
        linear_layers=len(hybrid.mamba2_cache_params.layers),
    )


def kv_bytes_per_token(model_config: Any, dtype: Any) -> int:
    """Keys and values of one token over all full-attention layers and ranks, in a cache of ``dtype``."""
    from sglang.srt.configs import hybrid_arch

    layers = len(hybrid_arch.mambaish_config(model_config).full_attention_layer_ids)
    return layers * kv_bytes_of_a_layer(model_config, dtype, ranks=1)


def kv_bytes_of_a_layer(model_config: Any, dtype: Any, ranks: int) -> int:
    """Keys and values of one token in one full-attention layer, on each of ``ranks``."""
    heads = max(1, int(model_config.get_total_num_kv_heads()) // ranks)
    return heads * int(model_config.head_dim + model_config.v_head_dim) * int(dtype.itemsize)


def attention_ranks() -> int:
    """Ranks among which heads are divided."""
    return int(importlib.import_module("sglang.srt.runtime_context").get_parallel().attn_tp_size)


def replayssm_record(nodes: int) -> int:
    """Tokens that `--enable-linear-replayssm-spec` keeps of a GDN request: up to 0.5.19 the longest draft, later a
    ring, which nothing but SGLang's sizing shows."""
    if version_numbers() < (0, 5, 20):
        return nodes
    return int(_configurator_module().get_exec().mamba.linear_replayssm_cache_len)
