"""What the hooks do while SGLang resolves its arguments and builds a model runner.

One decision is taken per model runner (`Serving`), when its attention backend is built; everything later follows it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import __version__, config, guards, modes
from ..compat import attention, ray_actors, startup, surfaces, version
from ..errors import MtpError
from ..families.table import FAMILIES
from ..metrics.facts import Facts, facts_of
from ..names import GDN, REWIND, SGLANG
from ..state import rewind, sizing
from ..state.arrivals import Arrivals
from ..state.pools import MtpMambaPool
from . import actors, registry

logger = logging.getLogger(__name__)

_DECISION, _FACTS = "_mamba_mtp_serving", "_mamba_mtp_facts"


@dataclass(frozen=True)
class Serving:
    """How one model runner is served.

    Attributes
        mode: the mode asked for.
        family_name: the kind of model, for people.
        backend: our linear-attention backend, or None where SGLang serves unchanged.
        family: key of ``backend``, or None.
        rewinds_to: the page size to whose multiples requests' states are rewound (`state.rewind`); 0: they are not.
        not_rewound_with: what stands against that, where nobody insists on it.
    """

    mode: modes.Mode
    family_name: str
    family: str | None = None
    backend: type | None = None
    rewinds_to: int = 0
    not_rewound_with: str = ""

    def radix(self, strategy: str) -> str:
        """How the radix cache gets its states, for people; ``strategy`` is SGLang's."""
        if self.rewinds_to:
            return REWIND
        return f"{strategy} (not rewound with {self.not_rewound_with})" if self.not_rewound_with else strategy


def _decide(model: Any, server_args: Any) -> Serving:
    mode = modes.current()
    if mode.stock:
        return Serving(mode, "any")
    family, name = startup.linear_family(model)
    if family is None:
        return Serving(mode, name)
    if not startup.resolved(server_args).speculative_algorithm:
        return Serving(mode, f"{name} (no speculative decoding)")
    if startup.only_prefills(server_args):
        _rewinding(mode, family, server_args)
        return Serving(mode, f"{name} (a prefill server, which verifies nothing)")
    guards.check(server_args, mode.guards, mode=mode.name, family=family, model=name)
    rewinds_to, obstacle = _rewinding(mode, family, server_args)
    if not rewinds_to:
        guards.check_snapshots(server_args, mode=mode.name, model=name)
    return Serving(mode, name, family, mode.backends[family], rewinds_to, obstacle)


def _rewinding(mode: modes.Mode, family: str | None, server_args: Any) -> tuple[int, str]:
    """`Serving.rewinds_to` and `Serving.not_rewound_with`.

    Raises
        MtpError: rewinding was asked for by its name, and something stands against it.
    """
    options = config.current()
    if not mode.rewinds or options.radix != REWIND or family is None:
        return 0, ""
    obstacle = rewind.why_not(server_args, FAMILIES[family].longest_window)
    if obstacle is None:
        return startup.page_size(server_args), ""
    if "radix" in options.given:
        raise MtpError(
            f"{options.spelled('radix')}: requests' states cannot be rewound with {obstacle}; change that, or take "
            f"{config.OPTIONS['radix'].flag} {SGLANG}"
        )
    return 0, obstacle


def decision(runner: Any) -> Serving:
    """How a `ModelRunner` is served; taken once and kept on it."""
    found = vars(runner).get(_DECISION)
    if found is None:
        found = _decide(runner.model_config, runner.server_args)
        setattr(runner, _DECISION, found)
    return found


# ---------------------------------------------------------------------------------------------------- launcher process


def refuse_early(result: None, server_args: Any) -> None:
    """AFTER `ServerArgs.check_server_args`: decline before any process is started or weight loaded.

    Raises
        SystemExit: something is declined, and a command line asked for it; the message is all the operator sees.
        MtpError: something is declined, and a program asked for it (`sglang.Engine`).
    """
    if modes.current().stock:
        return
    model = startup.model_config(server_args)
    if model is None:
        return
    try:
        _decide(model, server_args)
    except MtpError as error:
        if config.on_command_line():
            text = str(error)
            raise SystemExit(text if text.startswith("mamba-mtp") else f"mamba-mtp: {text}") from error
        raise


def load_plugins_in_actors(result: None, server_args: Any) -> None:
    """AFTER `ServerArgs.check_server_args`: where schedulers are Ray's actors and this mode serves them, let them load
    the plugin. It comes behind `refuse_early`.

    Raises
        MtpError: the arguments were resolved before the plugin was loaded here, as `RayEngine` does up to 0.5.18.
    """
    if not ray_actors.are_to_come(server_args):
        return
    model = None if modes.current().stock else startup.model_config(server_args)
    serving = None if model is None else _decide(model, server_args)
    if serving is None or serving.family is None:
        actors.choose(ours=False)
        return
    if _resolved_without_us(server_args, serving):
        raise MtpError(
            "mamba-mtp: SGLang resolved its arguments before it loaded the plugin, and decided what "
            "the plugin decides; call sglang.srt.plugins.load_plugins() before the engine is made"
        )
    actors.choose(ours=True)


def _resolved_without_us(server_args: Any, serving: Serving) -> bool:
    """Whether the arguments are such as `ngram_drafts_trees` and `verify_with_ours` leave none."""
    args = startup.resolved(server_args)
    if str(args.speculative_algorithm).upper() == "NGRAM" and args.speculative_eagle_topk == 1:
        return True
    derived = startup.derived_verify_backend(server_args) not in (None, "triton")
    return derived and serving.family == GDN and serving.mode.pool is not None


def ngram_drafts_trees(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `_handle_ngram`: NGRAM drafts trees at any breadth, so never let it pass as a chain (topk 1).

    SGLang sets topk to the breadth of the corpus search. At breadth 1 the drafts still branch (the corpus returns
    several matches), yet topk 1 makes the linear layers ignore the tree's links, FlashAttention ignore its mask, and
    the pool share conv windows between siblings: greedy output is silently wrong. topk 2 says "tree" to all of them.
    """
    steps_by_default = startup.resolved(server_args).speculative_num_steps is None
    original(server_args)
    args = startup.resolved(server_args)
    if modes.current().stock or args.speculative_eagle_topk > 1:
        return
    model = startup.model_config(server_args)
    if model is None or startup.linear_family(model)[0] is None:
        return
    decided = {"speculative_eagle_topk": 2}
    if steps_by_default:  # SGLang's own default for a tree of this topk
        decided["speculative_num_steps"] = max(1, args.speculative_num_draft_tokens // 2)
    startup.decide(server_args, "mamba_mtp.ngram_drafts_trees", **decided)


def verify_with_ours(result: None, server_args: Any) -> None:
    """AFTER `handle_linear_attn_backend`: where SGLang would verify with FlashInfer because it decodes with it, do not.

    It decodes with it unasked on some GPUs. A verify of ours never calls FlashInfer's, which fills buffers that we do
    not allocate; a backend that somebody named stays, to be declined.
    """
    derived = startup.derived_verify_backend(server_args)
    if derived in (None, "triton") or not startup.resolved(server_args).speculative_algorithm:
        return
    model = startup.model_config(server_args)
    if model is None or startup.linear_family(model)[0] != GDN:
        return
    startup.decide(server_args, "mamba_mtp.verify_with_ours", linear_attn_verify_backend="triton")
    logger.warning(  # up to 0.5.18 nobody has set logging up yet, and less would be lost
        "mamba-mtp: mode %s verifies with its own kernels, not with %s's, which follow the decode backend "
        "(decode and prefill keep theirs)",
        modes.current().name,
        derived,
    )


# --------------------------------------------------------------------------------------------------- scheduler process


@contextlib.contextmanager
def _backend_in_place_of_stock(family: str, backend: type) -> Iterator[None]:
    """SGLang imports the backend's name inside `attn_backend_wrapper`: let it find ours while that runs."""
    module, name = surfaces.backend_name(family)
    stock = getattr(module, name)
    setattr(module, name, backend)
    try:
        yield
    finally:
        setattr(module, name, stock)


def build_attention_backend(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """AROUND `attn_backend_wrapper`: build our linear-attention backend for a target model that has one."""
    if runner.is_draft_worker:
        return original(runner, full_attn_backend)
    serving = decision(runner)
    if serving.backend is None or serving.family is None:
        return original(runner, full_attn_backend)
    with _backend_in_place_of_stock(serving.family, serving.backend):
        built = original(runner, full_attn_backend)
    _require_ours(built, serving.backend)
    attention.plan_linear_layers_first(built)
    attention.plan_without_a_walk(runner.server_args)
    return built


def _require_ours(attn_backend: Any, backend: type) -> None:
    linear = getattr(attn_backend, "linear_attn_backend", None)
    if type(linear) is not backend:
        raise MtpError(
            f"mamba-mtp: SGLang built {type(linear).__name__} where {backend.__name__} was expected; "
            f"refusing to serve without the plugin under its name"
        )


def announce(result: None, runner: Any) -> None:
    """AFTER `ModelRunner.init_attention_backends`: prove that our backends are in charge, then say so in one line.

    Runs before CUDA graphs are captured and before the first forward.
    """
    if runner.is_draft_worker:
        return
    serving = decision(runner)
    sglang = version.sglang_version()
    if serving.backend is None:
        what = "mode off" if serving.mode.stock else f"{serving.family_name} model"
        _log(f"mamba-mtp {__version__}: {what}; SGLang {sglang} serves unchanged")
        return
    registry.prove()
    for attn_backend in (runner.attn_backend, *(runner.decode_attn_backend_group or ())):
        _require_ours(attn_backend, serving.backend)
    known = facts_of(
        runner,
        mode=serving.mode.name,
        family=serving.family_name,
        parts=serving.mode.speculative_bytes(runner.req_to_token_pool.mamba_pool),
        slots_gained=None if sizing.last is None else sizing.last.slots - sizing.last.stock_slots,
        radix=serving.radix(startup.radix_strategy(runner.server_args)),
    )
    setattr(runner, _FACTS, known)
    _log(known.line())
    pool = runner.req_to_token_pool.mamba_pool
    if isinstance(pool, MtpMambaPool):
        _warm_up(pool, runner)


def _warm_up(pool: MtpMambaPool, runner: Any) -> None:
    """Compile now what a step launches outside its captured graphs: no request is to wait for that, on any rank."""
    started = time.perf_counter()
    tracked = runner.req_to_token_pool.enable_mamba_extra_buffer
    pool.warm_up(startup.draft_lengths(runner.server_args), tracked=tracked)
    logger.debug("mamba-mtp: commit and slot kernels are ready after %.1f s", time.perf_counter() - started)


def facts(runner: Any) -> Facts | None:
    """What a `ModelRunner` was announced with; None where SGLang serves unchanged."""
    return vars(runner).get(_FACTS)


def _log(message: str) -> None:
    """Log ``message`` once per server, not once per rank."""
    from sglang.srt.utils.common import rank0_log

    rank0_log(message)


# -------------------------------------------------------------------------------------------------------- mamba pool


def _serving_of_pools(configurator: Any) -> Serving | None:
    """How the model runner of this `KVCacheConfigurator` will be served; None where its pools stay SGLang's."""
    if configurator.is_draft_worker:
        return None
    serving = _decide(configurator.model_config, configurator.server_args)
    return serving if serving.family is not None else None


def size_mamba_pool(original: Callable[..., float], configurator: Any, total_rest_memory: float) -> float:
    """AROUND `KVCacheConfigurator._handle_max_mamba_cache`: the mode says what speculation costs beside the slots."""
    serving = _serving_of_pools(configurator)
    if serving is None or serving.family is None or serving.mode.holds is None:
        return original(configurator, total_rest_memory)
    return sizing.size_with(
        serving.mode.holds, original, configurator, total_rest_memory, serving.family, serving.rewinds_to
    )


def slots_per_request(original: Callable[[Any], int], configurator: Any) -> int:
    """AROUND `KVCacheConfigurator._calculate_mamba_ratio`: state slots for every running request, the same for the
    target's configurator and for its draft worker's."""
    stock = original(configurator)
    if configurator.is_draft_worker:
        family, _ = startup.linear_family(startup.model_config(configurator.server_args))
        rewinds_to, _ = _rewinding(modes.current(), family, configurator.server_args)
    else:
        serving = _serving_of_pools(configurator)
        rewinds_to = 0 if serving is None else serving.rewinds_to
    return min(stock, rewind.slots_per_request(configurator.server_args)) if rewinds_to else stock


def build_request_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """AROUND `KVCacheConfigurator._build_hybrid_req_pool`, and on a decode server AROUND
    `_build_hybrid_mamba_decode_req_pool`: let SGLang build the mode's mamba pool."""
    serving = _serving_of_pools(configurator)
    if serving is None or serving.mode.pool is None:
        return original(configurator, **kwargs)
    attention.make_room_for_verifies(
        configurator.server_args,
        configurator.model_config,
        requests=kwargs["max_num_reqs"] + kwargs.get("pre_alloc_size", 0),
        nodes=startup.largest_draft(configurator.server_args),
    )
    if serving.rewinds_to:
        startup.skip_decode_locks()
        with startup.request_pool_built_as(rewind.RewindRequests):
            return original(configurator, **kwargs)
    pool = startup.hybrid_request_pool()
    stock = pool.mamba_pool_cls
    pool.mamba_pool_cls = serving.mode.pool
    try:
        built = original(configurator, **kwargs)
    finally:
        pool.mamba_pool_cls = stock
    if startup.only_decodes(configurator.server_args):
        built.mamba_pool.arrivals = Arrivals()
    return built
