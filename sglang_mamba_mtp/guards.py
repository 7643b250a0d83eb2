"""What the plugin declines to run with: each line names the flag, the value, the reason and the way out.

Guards apply to models the plugin has a backend for, and only where they decode speculatively: whatever the plugin does
not touch, it does not stop either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mamba_mtp_kernels.common.operands import MAX_NODES

from . import config
from .compat import startup
from .errors import MtpError
from .families.table import FAMILIES
from .names import MAMBA2, OFF


@dataclass(frozen=True)
class Decline:
    """One thing declined.

    Attributes
        flag: the flag as the operator spells it.
        value: reads the resolved value from the arguments, for the message and for ``declined``.
        declined: whether the value is declined.
        reason: why.
        remedy: what to do instead of switching the plugin off.
        family: the only family it is declined with; None: any.
        optional: whether some supported versions of SGLang have no such flag.
    """

    flag: str
    value: Callable[[Any], Any]
    declined: Callable[[Any], bool]
    reason: str
    remedy: str
    family: str | None = None
    optional: bool = False

    def message(self, args: Any) -> str | None:
        """The refusal for ``args``, or None.

        Raises
            MtpError: the installed SGLang has no such argument, so it cannot be told whether it is set.
        """
        try:
            value = self.value(args)
        except AttributeError as error:
            if self.optional:
                return None
            raise MtpError(f"SGLang no longer has the argument behind {self.flag}: {error}") from error
        if not self.declined(value):
            return None
        return f"{self.flag} {value}: {self.reason}; {self.remedy}"


def _switched_on(flag: str, reason: str, remedy: str | None = None, *, optional: bool = False) -> Decline:
    """A boolean flag that must stay off."""
    name = flag.removeprefix("--").replace("-", "_")
    return Decline(flag, lambda args: getattr(args, name), bool, reason, remedy or f"remove {flag}", optional=optional)


def _algorithm(args: Any) -> str:
    return str(args.speculative_algorithm or "").upper()


#: What drafts and commits as the plugin knows it.
KNOWN_ALGORITHMS = frozenset({"NEXTN", "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "NGRAM", "DFLASH"})
#: What a decode server was tried with. SGLang resolves NEXTN to EAGLE.
TRIED_ON_A_DECODE_SERVER = frozenset({"NEXTN", "EAGLE"})
#: SGLang's own algorithms that are not among the known ones.
UNTRIED_ALGORITHMS = frozenset({"DSPARK", "UNO"})
#: For whoever wants another one.
_KNOWN = "use NEXTN, EAGLE, EAGLE3, STANDALONE, NGRAM or DFLASH"


def _device(args: Any) -> str:
    """The device; SGLang says `cuda` for AMD's too."""
    hip = startup.hip_version()
    return f"{args.device} (ROCm {hip})" if hip and str(args.device).startswith("cuda") else ""


def _adaptive_settings(args: Any) -> str:
    """The settings of adaptive speculation, where they allow more draft nodes than a verify takes."""
    path = args.speculative_adaptive_config if args.speculative_adaptive else None
    return str(path) if path is not None and startup.longest_adaptive_chain(path) > MAX_NODES else ""


def _is_chain(args: Any) -> bool:
    return args.speculative_eagle_topk == 1 and _algorithm(args) != "NGRAM"


def _follows_from_steps(args: Any) -> bool:
    """Whether the number of draft nodes follows from the number of steps. DFLASH drafts its chain in one."""
    return _is_chain(args) and _algorithm(args) != "DFLASH"


def _chain_steps(args: Any) -> int:
    return (args.speculative_num_steps or 0) if _follows_from_steps(args) and not args.speculative_adaptive else 0


def _given_nodes(args: Any) -> int:
    return 0 if _follows_from_steps(args) else (args.speculative_num_draft_tokens or 0)


def _decode_graph_backend(args: Any) -> str:
    graphs = getattr(args, "cuda_graph_config", None)
    return str(getattr(getattr(graphs, "decode", None), "backend", None) or args.cuda_graph_backend_decode)


def _typed_verify_backend(args: Any) -> str:
    """The linear layers' verify backend, if one is named; what SGLang derives is settled by `hooks.startup`."""
    return str(args.linear_attn_verify_backend or "triton")


def _paged_ngram_tree(args: Any) -> str:
    if _algorithm(args) != "NGRAM" or (args.page_size or 1) == 1 or args.attention_backend == "flashinfer":
        return ""
    return f"{args.page_size} (attention backend {args.attention_backend})"


def _chain_only_backend(args: Any) -> str:
    """A full-attention backend that verifies chains only, where NGRAM drafts trees; SGLang checks this for EAGLE."""
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    return "trtllm_mha" if _algorithm(args) == "NGRAM" and "trtllm_mha" in backends else ""


def _flashinfer_tree(args: Any) -> str:
    """Mamba2's backend where it is FlashInfer's and drafts are not chains."""
    return "" if args.mamba_backend != "flashinfer" or _is_chain(args) else "flashinfer"


#: Declined in every mode but `off`.
COMMON: tuple[Decline, ...] = (
    Decline(
        "--device",
        lambda args: args.device,
        lambda device: str(device).partition(":")[0] not in ("cuda", "cpu"),
        "SGLang has linear-attention backends of its own for this device, which the plugin does not extend",
        "use cuda or cpu",
    ),
    Decline(
        "--device",
        _device,
        bool,
        "the kernels are written for NVIDIA's GPUs, and nothing here has run on another",
        "use an NVIDIA GPU",
    ),
    Decline(
        "--speculative-algorithm",
        lambda args: args.speculative_algorithm,
        lambda algorithm: str(algorithm).upper() in UNTRIED_ALGORITHMS,
        "its drafts may be of another length for every request (DSPARK), or trees of its own making (UNO), and what "
        "it commits was not tried here",
        _KNOWN,
    ),
    Decline(
        "--speculative-algorithm",
        lambda args: args.speculative_algorithm,
        lambda algorithm: str(algorithm or "NONE").upper() not in KNOWN_ALGORITHMS | UNTRIED_ALGORITHMS | {"NONE"},
        "it is not SGLang's own (another plugin registers it), so how it drafts and what it commits is not known here",
        _KNOWN,
    ),
    Decline(
        "--page-size",
        _paged_ngram_tree,
        bool,
        "NGRAM drafts trees at any breadth, and SGLang verifies trees over pages larger than 1 with FlashInfer only",
        "use --page-size 1 or --attention-backend flashinfer",
    ),
    Decline(
        "--attention-backend",
        _chain_only_backend,
        bool,
        "NGRAM drafts trees, which this backend attends to as chains",
        "use --attention-backend flashinfer, fa3 or triton",
    ),
    _switched_on(
        "--enable-linear-replayssm",
        "SGLang's decode ring keeps tokens out of the state that the plugin expects in it",
    ),
    _switched_on(
        "--enable-linear-replayssm-spec",
        "it is SGLang's own answer to the same problem (chains only) and allocates no buffers for the verify",
    ),
    _switched_on(
        "--enable-unified-memory",
        "its pool is a class of SGLang's own (UnifiedMambaPool), cut out of the keys' and values' memory, with slots "
        "that move, and a mode's own pool cannot take its place; 0.5.17 refuses it with speculation itself",
    ),
    _switched_on("--enable-page-major-kv-layout", "the state pool is strided by page, which is not tested"),
    Decline(
        "--hicache-storage-backend",
        lambda args: args.hicache_storage_backend if args.enable_hierarchical_cache else None,
        bool,
        "states that go on from the host's memory to a storage, and come from there, are not tested",
        "remove --hicache-storage-backend",
    ),
    _switched_on("--enable-lmcache", "its own radix cache copies states without this plugin's knowledge"),
    _switched_on(
        "--enable-unified-cache-external-linker",
        "states are loaded into slots without this plugin's knowledge",
        optional=True,  # from 0.5.20 on
    ),
    _switched_on(
        "--enable-streaming-session",
        "with speculation SGLang lets a session's next turn begin behind the last token of the answer before, which "
        "nothing has run: it is answered wrongly, in mode off as well",
        "remove --enable-streaming-session (plain sessions may stay)",
    ),
    _switched_on(
        "--enable-two-batch-overlap",
        "SGLang splits the layers of DeepSeek, MiMo and Qwen3-MoE in two, of no hybrid model, and with data-parallel "
        "attention ends with an error at the first batch that has state slots, in mode off too",
    ),
    Decline(
        "--enable-hierarchical-cache",
        lambda args: args.enable_hierarchical_cache if args.disaggregation_mode == "decode" else False,
        bool,
        "a decode server that has states come from a prefill server and from its own host was not tried",
        "remove --enable-hierarchical-cache there (the prefill server may have it)",
    ),
    Decline(
        "--speculative-algorithm",
        lambda args: args.speculative_algorithm if args.disaggregation_mode == "decode" else None,
        lambda name: name is not None and str(name).upper() not in TRIED_ON_A_DECODE_SERVER,
        "a decode server begins to draft from what a prefill server sends; that was tried with NEXTN alone (EAGLE is "
        "SGLang's name for it too), and for this one SGLang sends something else, or nothing, or not in every version",
        "use NEXTN there",
    ),
    _switched_on(
        "--disaggregation-decode-enable-offload-kvcache",
        "what a decode server puts into a storage was not tried here",
    ),
    Decline(
        "--pp-size",
        lambda args: args.pp_size,
        lambda stages: stages > 1,
        "SGLang gives a speculative server one stage, or more behind SGLANG_ENABLE_PP_SPEC, where all stages but the "
        "last learn what a verify accepted behind other batches' forwards, and a commit here is of the last forward; "
        "the first stage caches wrong states there, in mode off too",
        "use --tp-size instead",
    ),
    Decline(
        "--dcp-size",
        lambda args: args.dcp_size,
        lambda ranks: ranks > 1,
        "decode context parallelism makes the radix cache's pages as many times longer as there are ranks, which the "
        "plugin's rewinding does not know and nothing here has run",
        "remove --dcp-size (--tp-size may stay)",
    ),
    Decline(
        "--cuda-graph-backend-decode",
        _decode_graph_backend,
        lambda backend: backend.rpartition(".")[2].lower() == "breakable",
        "SGLang's own backend does not capture these models: the server ends at its start in mode off as well, with "
        "0.5.17 and 0.5.23 (tried on a GPU); where it breaks, at the linear layers, these run on a prefill's batch",
        "use --cuda-graph-backend-decode full",
    ),
    Decline(
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        lambda args: startup.glues_metadata(),
        bool,
        "what is to happen to state slots before a forward reads them is queued on the host, and a graph that is "
        "replayed in place of the forward's preparation leaves the queue as it is",
        "unset it",
    ),
)

_ANCESTORS = f"and a verify keeps a node's ancestors as bits of one word, for at most {MAX_NODES} nodes"

#: Declined where the plugin verifies with kernels of its own.
OWN_VERIFY: tuple[Decline, ...] = (
    Decline(
        "--speculative-num-draft-tokens",
        _given_nodes,
        lambda nodes: nodes > MAX_NODES,
        f"a draft has that many nodes, {_ANCESTORS}",
        f"use --speculative-num-draft-tokens {MAX_NODES} or fewer",
    ),
    Decline(
        "--speculative-num-steps",
        _chain_steps,
        lambda steps: steps >= MAX_NODES,
        f"a chain has one node more than steps, {_ANCESTORS}",
        f"use --speculative-num-steps {MAX_NODES - 1} or fewer",
    ),
    Decline(
        "--speculative-adaptive-config",
        _adaptive_settings,
        bool,
        f"its longest chain has one node more than steps, {_ANCESTORS}",
        f"list no candidate_steps above {MAX_NODES - 1}",
    ),
    Decline(
        "--linear-attn-verify-backend",
        _typed_verify_backend,
        lambda backend: backend != "triton",
        "it verifies into SGLang's per-node state buffers, which this mode does not allocate",
        "remove --linear-attn-verify-backend (decode and prefill may keep theirs)",
    ),
    _switched_on("--enable-mamba-cache-stochastic-rounding", "the fold is exact and rounds once, to nearest"),
)


#: Declined where SGLang's own kernels verify.
SGLANGS_VERIFY: tuple[Decline, ...] = (
    Decline(
        "--mamba-backend",
        _flashinfer_tree,
        bool,
        "FlashInfer's kernel verifies, and it verifies chains of NEXTN and its like only",
        "use --mamba-backend triton, or --mamba-mtp-mode replay or slots, which verify with kernels of their own",
        family=MAMBA2,
    ),
)


def declined(args: Any, guards: Iterable[Decline], family: str) -> list[str]:
    """The refusals of ``guards`` for resolved arguments ``args`` and a model of ``family``."""
    asked = [guard for guard in guards if guard.family in (None, family)]
    return [text for guard in asked if (text := guard.message(args)) is not None]


def window_too_long(options: config.MtpConfig, family: str) -> list[str]:
    """The refusal of a window that a verify of ``family`` is not compiled for, if it is one."""
    longest = FAMILIES[family].longest_window
    if options.window is None or options.window <= longest:
        return []
    return [
        f"{options.spelled('window')}: a verify keeps its window in shared memory, and where it is longer than "
        f"{longest} a {family} model's does not fit a GPU; use at most {longest}"
    ]


def no_inner_states(server_args: Any) -> list[str]:
    """The refusal of DFLASH with a model whose class, in the installed SGLang, does not show its inner states, if it is
    one. SGLang would say so too, once it has loaded the weights."""
    if _algorithm(startup.resolved(server_args)) != "DFLASH":
        return []
    model = startup.hides_inner_states(server_args)
    if model is None:
        return []
    return [
        f"--speculative-algorithm DFLASH: its draft reads the target's inner states, which {model} of the installed "
        f"SGLang does not hand out (NemotronHForCausalLM does from 0.5.19 on); use another algorithm"
    ]


def snapshots_too_close(server_args: Any) -> list[str]:
    """The refusal of snapshots at intervals that two verifies in a row may both cross, with overlap scheduling.

    SGLang plans a verify before it has seen how far the one before it got: both then write the same slot, and a request
    that ends with the first is cached with the state of the second (0.5.17: with the slot that neither wrote). Lazy
    snapshots look for this themselves.
    """
    args = startup.resolved(server_args)
    if args.disable_radix_cache or args.disable_overlap_schedule or args.mamba_radix_cache_strategy != "extra_buffer":
        return []
    nodes = startup.draft_lengths(server_args)[-1]
    if startup.snapshot_interval(server_args) >= 2 * nodes:
        return []
    return [
        f"--mamba-track-interval {args.mamba_track_interval}: two verifies of {nodes} nodes may cross two boundaries, "
        f"and with overlap scheduling both would take their snapshot into one slot; use {2 * nodes} or more, or "
        f"--mamba-radix-cache-strategy extra_buffer_lazy"
    ]


def no_radix_strategy(server_args: Any) -> list[str]:
    """The refusal of a radix cache that SGLang has chosen no strategy for, if it has not.

    Its lists of architectures then lack the model's. Its cache would take requests' own slots over while the next step
    runs in them: ``no_buffer`` with overlap scheduling, which it refuses itself where it knows the model.
    """
    args = startup.resolved(server_args)
    if args.disable_radix_cache or args.mamba_radix_cache_strategy != "auto":
        return []
    model = startup.model_class(server_args).__name__
    return [
        f"--mamba-radix-cache-strategy auto: the installed SGLang does not know {model} "
        "and chooses no strategy for it; use --mamba-radix-cache-strategy extra_buffer"
    ]


def _refuse(refusals: list[str], mode: str, model: str) -> None:
    if not refusals:
        return
    lines = "\n".join(f"  - {text}" for text in refusals)
    raise MtpError(
        f"mamba-mtp mode {mode!r} cannot serve this {model} model:\n{lines}\n"
        f"Or serve with SGLang's own verify: {config.current().instead(OFF)}"
    )


def check(server_args: Any, guards: Iterable[Decline], *, mode: str, family: str, model: str) -> None:
    """Check the arguments of a server that decodes speculatively with a model that ``mode`` has a backend for.

    ``model`` names the kind of model, for people.

    Raises
        MtpError: something is declined; the message lists everything that is.
    """
    refusals = declined(startup.resolved(server_args), guards, family)
    refusals += window_too_long(config.current(), family)
    refusals += no_inner_states(server_args) + no_radix_strategy(server_args)
    _refuse(refusals, mode, model)


def check_snapshots(server_args: Any, *, mode: str, model: str) -> None:
    """Check the arguments of such a server, where the radix cache is SGLang's alone (`state.rewind` is not used).

    Raises
        MtpError: as in `check`.
    """
    _refuse(snapshots_too_close(server_args), mode, model)
