"""What a server would have room for and when speculation pays, worked out from a model's configuration.

Sizes are SGLang's own arithmetic (`compat.planning`) and this plugin's (`state.sizing`); break-even is an estimate
(`costs.step`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mamba_mtp_kernels.common.operands import MAX_NODES

from . import config, names
from .compat import planning, startup
from .costs.beside import WORKSPACES, graph_bytes
from .costs.step import Drafting, StepModel, machine_named, state_traffic
from .errors import MtpError
from .families.table import FAMILIES
from .state import sizing
from .state.rewind import SLOTS_PER_REQUEST, SLOTS_PER_REQUEST_WITH_HOST
from .state.window import threshold_for

GIB, MIB = 1 << 30, 1 << 20
#: With "none" SGLang takes as many slots as requests are asked for, so it needs ``--max-running-requests``.
STRATEGIES = (names.REWIND, "extra_buffer", "extra_buffer_lazy", "no_buffer", "none")
AS_MANY_AS_FIT = 4096
#: ``--mem-fraction-static``, unless it is given or leaves too little.
FRACTION = 0.85


@dataclass(frozen=True)
class Way:
    """A way of serving: its ``flags`` beside those all share, what it ``holds`` for a request in place of SGLang's
    states per draft node, whether it ``speculates``, and which families it is offered for (None: all)."""

    name: str
    mode: str
    flags: tuple[str, ...] = ()
    holds: sizing.Holding | None = None
    speculates: bool = True
    replayssm: bool = False
    families: tuple[str, ...] | None = None


WAYS = (
    Way("no speculation", names.OFF, speculates=False),
    Way("SGLang's verify", names.OFF, ("--mamba-mtp-mode", names.OFF)),
    Way(
        "ReplaySSM flag",
        names.OFF,
        ("--mamba-mtp-mode", names.OFF, "--enable-linear-replayssm-spec"),
        replayssm=True,
        families=(names.GDN,),
    ),
    Way("slots", names.SLOTS, ("--mamba-mtp-mode", names.SLOTS), holds=sizing.DRAFT_SLOTS),
    Way("replay", names.REPLAY, holds=sizing.WINDOWS),
)


@dataclass(frozen=True)
class Row:
    """What one way of serving has room for. Bytes are those of one rank.

    Attributes
        way, strategy: as in `WAYS` and `STRATEGIES`.
        slots: state slots; requests: the most that run at a time; tokens: of the KV cache.
        request_bytes: recurrent state of a running request, its share of slots and what speculation holds for it.
        break_even: accept length at which a full batch is as fast as without speculation; None without.
        draft_bytes, graph_bytes: what the drafts' keys and values and what CUDA graphs take beside all pools.
        why: why it cannot be served; the numbers are then 0.
    """

    way: str
    strategy: str
    slots: int = 0
    requests: int = 0
    tokens: int = 0
    request_bytes: int = 0
    break_even: float | None = None
    draft_bytes: int = 0
    graph_bytes: int = 0
    why: str = ""

    @property
    def beside(self) -> int:
        """Bytes that ``--mem-fraction-static`` must leave; an estimate."""
        return self.draft_bytes + self.graph_bytes + WORKSPACES


@dataclass(frozen=True)
class Advice:
    """All of it: ``slot_bytes`` is the state of one slot on a rank, ``memory`` the GiB of a rank for pools,
    ``fraction`` the ``--mem-fraction-static``, ``launched`` the row that the line to ``launch`` is of."""

    model: str
    family: str
    slot_bytes: int
    weights: float
    weights_from: str
    memory: float
    fraction: float
    rows: tuple[Row, ...]
    launched: Row
    launch: str

    def enough(self, gpu_memory: float) -> bool:
        """Whether ``fraction`` leaves of ``gpu_memory`` GiB what the server takes beside its pools."""
        return self.launched.beside <= gpu_memory * (1 - self.fraction) * GIB


def advise(options: argparse.Namespace) -> Advice:
    """Work everything out.

    Raises
        MtpError: the model is not one the plugin serves, has no configuration, or its weights do not fit.
    """

    folder = Path(options.model_path)
    if (folder.is_absolute() or folder.exists()) and not (folder / "config.json").is_file():
        raise MtpError(f"--model-path {folder}: there is no config.json")
    _check_drafts(options)
    if options.window is not None:
        os.environ[config.OPTIONS["window"].env] = str(options.window)
    plain = planning.Setting(
        model=options.model_path,
        ranks=options.tp,
        draft=options.draft_model_path,
        nodes=options.draft_nodes,
        steps=options.draft_steps,
        topk=options.topk,
        max_requests=options.max_running_requests or AS_MANY_AS_FIT,
        dtype=options.dtype,
        state_dtype=options.state_dtype,
        context=options.context_len,
        trust_remote_code=options.trust_remote_code,
    )
    with planning.configurator(replace(plain, strategy=None)) as found:
        family, kind = startup.linear_family(found.model_config)
        if family is None:
            raise MtpError(
                f"--model-path {options.model_path} is no model this plugin serves ({kind}): SGLang serves it unchanged"
            )
        _check_model(options, family, found.model_config)
        slot_bytes = startup.cache_params(found.model_config).mamba_cache_per_req
        weights, weights_from = _weights(options, found.model_config)

    def with_fraction(fraction: float) -> Advice:
        memory = options.gpu_memory * fraction - weights / options.tp
        if memory <= 0:
            raise MtpError(
                f"{weights:.1f} GiB of weights ({weights_from}) on {options.tp} rank(s) do not fit into "
                f"{fraction} of {options.gpu_memory:g} GiB: raise --tp, --gpu-memory or --mem-fraction-static"
            )
        rows = tuple(_rows(options, plain, family, memory, weights))
        best = _most_requests(rows)
        line = _launch_line(options, best, fraction)
        return Advice(options.model_path, kind, slot_bytes, weights, weights_from, memory, fraction, rows, best, line)

    if options.mem_fraction_static is not None:
        return with_fraction(options.mem_fraction_static)
    usual = with_fraction(FRACTION)
    if usual.enough(options.gpu_memory):
        return usual
    return _largest_that_leaves_enough(with_fraction, options.gpu_memory) or usual


def _largest_that_leaves_enough(with_fraction: Callable[[float], Advice], gpu_memory: float) -> Advice | None:
    """With the largest fraction below the usual one, in hundredths; None if there is none. Fewer requests take less."""

    def takes_too_much(hundredths: int) -> bool:
        try:
            return not with_fraction(hundredths / 100).enough(gpu_memory)
        except MtpError:  # nothing fits
            return False

    try:
        return with_fraction(bisect_left(range(1, round(100 * FRACTION)), True, key=takes_too_much) / 100)
    except MtpError:
        return None


def _rows(options: argparse.Namespace, plain: Any, family: str, memory: float, weights: float) -> Iterator[Row]:
    ways = [way for way in WAYS if way.families is None or family in way.families]
    if options.mode is not None:
        ways = [way for way in ways if way.mode in (names.OFF, options.mode)]
    if options.radix_strategy:
        strategies: tuple[str, ...] = (options.radix_strategy,)
    else:
        strategies = STRATEGIES if options.max_running_requests else STRATEGIES[:-1]
    for strategy in strategies:
        for way in ways:
            if way.replayssm and (options.topk > 1 or options.algorithm.upper() == "DFLASH"):
                continue  # chains only, of NEXTN and its like
            if strategy == names.REWIND and way.mode != names.REPLAY:
                continue
            setting = replace(
                plain,
                strategy={"none": None, names.REWIND: "extra_buffer"}.get(strategy, strategy),
                overlap=strategy != "no_buffer",
                algorithm=options.algorithm if way.speculates else None,
                replayssm=way.replayssm,
            )

            row = partial(_row, options, way, strategy, family, memory, weights)
            try:
                if way.replayssm and options.max_running_requests is None:
                    yield _fullest(row, setting)
                else:
                    yield row(setting)
            except (MtpError, RuntimeError) as error:
                yield Row(way.name, strategy, why=str(error).strip().split("\n")[0])


def _fullest(row: Callable[[Any], Row], setting: Any) -> Row:
    """The row of the most requests asked for that all run. SGLang from 0.5.20 on holds the flag's records for all that
    are asked for, so what is asked for takes room from slots.

    Raises
        MtpError, RuntimeError: as ``row``, for one request.
    """

    def does_not_run(requests: int) -> bool:
        try:
            return row(replace(setting, max_requests=requests)).requests < requests
        except (MtpError, RuntimeError):
            return True

    found = bisect_left(range(1, AS_MANY_AS_FIT + 1), True, key=does_not_run)
    return row(replace(setting, max_requests=max(1, found)))


def _row(
    options: argparse.Namespace, way: Way, strategy: str, family: str, memory: float, weights: float, setting: Any
) -> Row:
    rewinds_to = int(strategy == names.REWIND)  # the advice is for pages of one token
    if rewinds_to:
        held = SLOTS_PER_REQUEST_WITH_HOST if options.enable_hierarchical_cache else SLOTS_PER_REQUEST
        setting = replace(setting, slots_per_request=held)
    with planning.configurator(setting) as found:
        if rewinds_to and not startup.may_choose_radix_strategy(found.server_args):
            raise MtpError(
                "SGLang chooses no radix strategy for this model, and a server that is given one rewinds nothing"
            )
        size, ratio = type(found)._handle_max_mamba_cache, found._calculate_mamba_ratio()
        if way.holds is None:
            rest = size(found, memory)
        else:
            rest = sizing.size_with(way.holds, size, found, memory, family, rewinds_to)
        slots = int(startup.schedule().max_mamba_cache_size)
        if rest <= 0:
            raise MtpError("nothing is left for the KV cache (fewer --max-running-requests, or more memory)")
        tokens = found.config_from_budget(int(rest * GIB)).max_total_num_tokens
        requests = found.resolve_max_num_reqs(tokens)
        slot = startup.cache_params(found.model_config).mamba_cache_per_req
        beside = _speculative_bytes(found, way, family, setting.nodes, slot, rewinds_to) if way.speculates else 0
        return Row(
            way.name,
            strategy,
            slots=slots,
            requests=requests,
            tokens=int(tokens),
            request_bytes=ratio * slot + beside,
            break_even=_break_even(options, found, way, requests, slot, weights) if way.speculates else None,
            draft_bytes=int(tokens) * _draft_kv_bytes(options, found) if way.speculates else 0,
            graph_bytes=_graph_bytes(options, found, requests) if way.speculates else 0,
        )


def _speculative_bytes(found: Any, way: Way, family: str, nodes: int, slot: int, rewinds_to: int) -> int:
    """What speculation holds for one running request."""
    if way.holds is not None:
        return way.holds.bytes_per_row(found, family, nodes, rewinds_to)
    if way.replayssm:
        params = startup.cache_params(found.model_config)
        return int(params.replayssm_ring_bytes_per_req(record_len=startup.replayssm_record(nodes)))
    return nodes * slot


def _drafting(options: argparse.Namespace) -> Drafting:
    algorithm = options.algorithm.upper()
    chain = options.topk == 1 and algorithm != "NGRAM"
    forwards = {"NGRAM": 0, "DFLASH": 1}.get(algorithm, planning.steps(options.draft_nodes, options.draft_steps))
    return Drafting(options.draft_nodes, chain, forwards)


def _draft_kv_bytes(options: argparse.Namespace, found: Any) -> int:
    """Keys and values of a token in the draft's one layer, on a rank: SGLang sets nothing aside for it, but for
    DFLASH's. Other models that draft are not looked into."""
    if options.algorithm.upper() in ("NGRAM", "DFLASH"):
        return 0
    return startup.kv_bytes_of_a_layer(found.model_config, found.kv_cache_dtype, options.tp)


def _graph_bytes(options: argparse.Namespace, found: Any, requests: int) -> int:
    vocabulary = int(found.model_config.vocab_size)
    return int(graph_bytes(requests, _drafting(options), options.topk, vocabulary, options.tp))


def _break_even(
    options: argparse.Namespace, found: Any, way: Way, requests: int, slot: int, weights: float
) -> float | None:
    drafting = _drafting(options)
    try:
        size = startup.size_of_model(found.model_config)
    except ValueError:
        return None
    model = StepModel(
        size=size,
        parameter_bytes=weights * GIB / size.total,
        state_bytes=slot * options.tp,
        kv_bytes=startup.kv_bytes_per_token(found.model_config, found.kv_cache_dtype),
        ranks=options.tp,
        machine=machine_named(options.gpu),
    )
    mode = names.REPLAY if way.replayssm else way.mode  # it, too, reads a state once and seldom writes it
    traffic = state_traffic(mode, drafting, threshold_for(config.current().window, options.draft_nodes))
    return model.break_even(requests, options.request_tokens, drafting, traffic)


def _weights(options: argparse.Namespace, model_config: Any) -> tuple[float, str]:
    """GiB of the model's files, and where that is from."""
    if options.weights is not None:
        return options.weights, "as given"
    folder = Path(options.model_path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        size = json.loads(index.read_text()).get("metadata", {}).get("total_size")
        if size:
            return int(size) / GIB, index.name
    held = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if held:
        return held / GIB, "the model's files"

    try:
        size = startup.size_of_model(model_config)
    except ValueError as error:
        raise MtpError(f"{error}: say with --weights how many GiB the model's files take") from error
    return size.total * model_config.dtype.itemsize / GIB, "counted from config.json"


def _check_drafts(options: argparse.Namespace) -> None:
    """Refuse drafts and options that a server is refused with.

    Raises
        MtpError: names the option, the value and what to do.
    """
    nodes, algorithm = options.draft_nodes, options.algorithm.upper()
    if nodes > MAX_NODES:
        raise MtpError(f"--draft-nodes {nodes}: a verify takes {MAX_NODES} at most; use {MAX_NODES} or fewer")
    follows = options.topk == 1 and algorithm not in ("NGRAM", "DFLASH")  # SGLang takes a chain's nodes from its steps
    if follows and options.draft_steps not in (None, nodes - 1):
        raise MtpError(
            f"--draft-steps {options.draft_steps}: a chain of {nodes} nodes is drafted in {nodes - 1}; leave it "
            f"out, or say with --topk how many branches a tree has"
        )
    if options.mode == names.SLOTS:
        if options.window is not None:
            raise MtpError(f"--window {options.window}: no effect in mode slots; leave it out")
        if options.radix_strategy == names.REWIND:
            raise MtpError("--radix-strategy rewind: states are rewound in mode replay alone; leave one of the two out")


def _check_model(options: argparse.Namespace, family: str, model_config: Any) -> None:
    """The same with what hangs on the model.

    Raises
        MtpError: names the option, the value and what to do.
    """
    longest = FAMILIES[family].longest_window
    if options.window is not None and options.window > longest:
        raise MtpError(f"--window {options.window}: a verify of a {family} model takes {longest} at most")
    if model_config.num_attention_heads % options.tp:
        raise MtpError(
            f"--tp {options.tp}: the model's {model_config.num_attention_heads} attention heads cannot be split evenly "
            f"over so many ranks"
        )


def _most_requests(rows: Sequence[Row]) -> Row:
    """The best of the plugin's ways, with overlap scheduling where there is a choice."""
    ways = {way.name: way for way in WAYS}
    ours = [row for row in rows if not row.why and ways[row.way].mode != names.OFF]
    if not ours:
        raise MtpError("nothing fits: " + "; ".join(sorted({row.why for row in rows if row.why})))
    usual = [row for row in ours if row.strategy != "no_buffer"]
    return max(usual or ours, key=lambda row: (row.requests, ways[row.way].mode == names.REPLAY))


def _launch_line(options: argparse.Namespace, best: Row, fraction: float) -> str:
    """The command that serves what ``best`` says."""
    way = next(way for way in WAYS if way.name == best.way)
    line = ["python", "-m", "sglang.launch_server", "--model-path", options.model_path]
    line += ["--tp", str(options.tp), "--mem-fraction-static", f"{fraction:g}"]
    line += ["--max-running-requests", str(best.requests)]
    if best.strategy == "none":
        line += ["--disable-radix-cache"]
    elif best.strategy != names.REWIND:  # which is what replay does unless it is told otherwise
        line += ["--mamba-radix-cache-strategy", best.strategy]
    if options.enable_hierarchical_cache and best.strategy != "none":
        line += ["--enable-hierarchical-cache"]
    line += ["--disable-overlap-schedule"] if best.strategy == "no_buffer" else []
    line += ["--speculative-algorithm", options.algorithm, "--speculative-num-draft-tokens", str(options.draft_nodes)]
    line += ["--speculative-draft-model-path", options.draft_model_path] if options.draft_model_path else []
    if options.algorithm.upper() not in ("NGRAM", "DFLASH"):
        line += ["--speculative-num-steps", str(planning.steps(options.draft_nodes, options.draft_steps))]
        line += ["--speculative-eagle-topk", str(options.topk)]
    for flag, value in (
        ("--dtype", options.dtype if options.dtype != "auto" else None),
        ("--mamba-ssm-dtype", options.state_dtype),
        ("--context-length", options.context_len),
        ("--mamba-mtp-window", options.window if way.mode == names.REPLAY else None),
    ):
        line += [flag, str(value)] if value is not None else []
    return shlex.join([*line, *way.flags])  # it is pasted into a shell
