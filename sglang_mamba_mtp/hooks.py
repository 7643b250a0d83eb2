"""The hook table: which surface of SGLang gets which function of ours, in which modes, and why.

Hooks go through SGLang's own registry. SGLang only logs when a plugin or a hook fails, and then serves without it; so
every surface is checked when the plugin registers, the registry's own `apply_hooks` is made to end with `prove`, and
`prove` runs again in every model runner before its first forward.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import compat
from .errors import MtpError
from .modes import MODES, OwnVerify

#: Modes in which SGLang does not serve unchanged.
OURS = frozenset(name for name, mode in MODES.items() if not mode.stock)
#: Modes with a mamba pool of their own.
OWN_POOL = frozenset(name for name, mode in MODES.items() if issubclass(mode, OwnVerify))
#: Every mode: what lets the operator choose one.
ALL = frozenset(MODES)


@dataclass(frozen=True)
class Hook:
    """One row of the table.

    Attributes
        surface: key of `compat.HOOKED`.
        kind: BEFORE, AFTER or AROUND, as in SGLang's `HookType`.
        function: ``module:function`` of this package, imported when the table is registered.
        modes: the modes in which the row is registered.
        why: what it is for.
    """

    surface: str
    kind: str
    function: str
    modes: frozenset[str]
    why: str

    @property
    def target(self) -> compat.Surface:
        """The surface that is patched."""
        return compat.HOOKED[self.surface]

    def load(self) -> Callable[..., Any]:
        """Our function."""
        return _load(self.function)


TABLE: tuple[Hook, ...] = (
    Hook("add_cli_args", "AFTER", "cli:offer_flags", ALL, "--mamba-mtp-* in --help and in the parser"),
    Hook("from_cli_args", "AROUND", "cli:take_flags", ALL, "flags into the environment, which workers inherit"),
    Hook("check_server_args", "AFTER", "serving:refuse_early", OURS, "decline before anything is started"),
    Hook("handle_ngram", "AROUND", "serving:ngram_drafts_trees", OURS, "NGRAM at breadth 1 still drafts trees"),
    Hook("track_entry", "AFTER", "serving:collect_track_entry", OURS, "host copy of one request's tracking"),
    Hook("prepare_for_extend", "AROUND", "serving:collect_track_entries", OURS, "host copies for the whole batch"),
    Hook("attn_backend_wrapper", "AROUND", "serving:build_attention_backend", OURS, "our linear-attention backend"),
    Hook("init_attention_backends", "AFTER", "serving:announce", OURS, "proof before the first forward, log line"),
    Hook("build_request_pool", "AROUND", "serving:build_request_pool", OWN_POOL, "the mode's mamba pool"),
    Hook("size_mamba_pool", "AROUND", "serving:size_mamba_pool", OWN_POOL, "bytes saved become state slots"),
    Hook("prepare_for_caching", "BEFORE", "caching:before_donation", OWN_POOL, "a donated slot holds all its tokens"),
    Hook(
        "prepare_for_caching", "BEFORE", "caching:forget_snapshot_past_the_key", OURS, "nor a snapshot ahead of its key"
    ),
    Hook(
        "track_indices", "AFTER", "caching:track_only_into_own_snapshots", OURS, "nothing is tracked into freed slots"
    ),
    Hook("accept_grammar", "AROUND", "caching:drop_state_past_a_grammar", OURS, "no state is cached ahead of its key"),
    Hook("prefill_result", "AROUND", "caching:count_what_a_tail_ends_with", OURS, "nor with a key behind its state"),
    Hook("lazy_prepare", "AFTER", "caching:forget_overwritten_snapshots", OURS, "nor a snapshot written over"),
    Hook("plan_stream", "AROUND", "serving:plan_behind_the_forward", OURS, "a step is not prepared over the last one"),
    Hook("commit", "AROUND", "serving:commit", OURS, "the mode records what a verify accepted"),
)

_registered: list[Hook] = []


@functools.cache
def _load(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


def active(mode: str) -> list[Hook]:
    """The rows registered in ``mode``."""
    return [hook for hook in TABLE if mode in hook.modes]


def registered() -> list[Hook]:
    """The rows registered in this process."""
    return list(_registered)


def problems(rows: list[Hook]) -> Iterator[str]:
    """What is wrong with the surfaces of ``rows``, and of the backends if any row belongs to them."""
    relied_on = compat.RELIED_ON if any(hook.modes is not ALL for hook in rows) else ()
    for surface in (*(hook.target for hook in rows), *relied_on):
        try:
            surface.check()
        except MtpError as error:
            yield str(error)


def register(rows: list[Hook]) -> None:
    """Check every surface, hand ``rows`` to SGLang's registry, and make its `apply_hooks` end with our proof.

    Raises
        MtpError: a surface is missing or not what we expect.
    """
    found = list(problems(rows))
    if found:
        raise MtpError("SGLang is not what the plugin was written for:\n" + "\n".join(f"  - {text}" for text in found))
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in rows:
        HookRegistry.register(hook.target.dotted, hook.load(), HookType[hook.kind])
    _registered.extend(rows)
    _prove_after_apply(HookRegistry)


def _prove_after_apply(registry: Any) -> None:
    apply_hooks = registry.apply_hooks

    def apply_and_prove(cls: type) -> None:
        apply_hooks()
        try:
            prove()
        except MtpError as error:
            raise SystemExit(f"mamba-mtp: {error}") from error

    registry.apply_hooks = classmethod(apply_and_prove)


def prove() -> None:
    """Check that every registered row is live.

    Raises
        MtpError: one is not.
    """
    dead = [f"{hook.target.path} ({hook.kind} {hook.function})" for hook in _registered if not is_live(hook)]
    if dead or not _registered:
        raise MtpError(
            "these hooks are not live, so SGLang would serve without them:\n"
            + "\n".join(f"  - {text}" for text in dead or ["none was registered"])
        )


def is_live(hook: Hook) -> bool:
    """Whether calling the surface calls our function, wherever the surface was imported to."""
    owner, name, attribute = hook.target.resolve()
    wrapped = attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute
    function = hook.load()
    if not any(_calls(layer, function) for layer in _layers(wrapped)):
        return False
    if not isinstance(owner, ModuleType):
        return True
    original = inspect.unwrap(wrapped)
    return not any(
        vars(module).get(name) is original for module in list(sys.modules.values()) if isinstance(module, ModuleType)
    )


def _layers(function: Any) -> Iterator[Any]:
    """``function`` and what it wraps, outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _calls(wrapper: Any, function: Callable[..., Any]) -> bool:
    """Whether ``wrapper``, made by SGLang's registry, holds ``function``."""
    return any(cell.cell_contents is function for cell in getattr(wrapper, "__closure__", None) or () if _filled(cell))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if empty
    except ValueError:
        return False
    return True
