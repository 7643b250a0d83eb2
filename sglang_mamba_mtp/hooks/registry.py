"""A hook, how hooks are handed to SGLang, and the proof that they are live.

Hooks go through SGLang's own registry. SGLang only logs when a plugin or a hook fails, and then serves without it; so
every surface is checked when the plugin registers, the registry's own `apply_hooks` is made to end with `prove`, and
`prove` runs again in every model runner before its first forward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..compat.records import function_of
from ..compat.surfaces import HOOKED, Surface
from ..errors import MtpError
from .bindings import looked_up_at_once


@dataclass(frozen=True)
class Hook:
    """One row of the table.

    Attributes
        surface: key of `compat.surfaces.HOOKED`.
        kind: BEFORE, AFTER or AROUND, as in SGLang's `HookType`.
        function: ours.
        modes: the modes in which the row is registered.
        why: what it is for.
    """

    surface: str
    kind: str
    function: Callable[..., Any]
    modes: frozenset[str]
    why: str

    @property
    def target(self) -> Surface:
        """The surface that is patched."""
        return HOOKED[self.surface]


_registered: list[Hook] = []


def registered() -> list[Hook]:
    """The rows registered in this process."""
    return list(_registered)


def problems(surfaces: Iterable[Surface]) -> Iterator[str]:
    """What is wrong with ``surfaces``."""
    for surface in surfaces:
        try:
            surface.check()
        except MtpError as error:
            yield str(error)


def require(surfaces: Iterable[Surface]) -> None:
    """Check ``surfaces``.

    Raises
        MtpError: one is missing or not what we expect; the message lists all of them.
    """
    found = list(problems(surfaces))
    if found:
        raise MtpError("SGLang is not what the plugin was written for:\n" + "\n".join(f"  - {text}" for text in found))


def register(rows: Iterable[Hook]) -> None:
    """Hand ``rows`` to SGLang's registry, and make its `apply_hooks` end with our proof."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    offer(rows)
    _prove_after_apply(HookRegistry)


def offer(rows: Iterable[Hook]) -> None:
    """Hand ``rows`` to SGLang's registry; whether they come to life is not asked."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in rows:
        HookRegistry.register(hook.target.dotted, hook.function, HookType[hook.kind])
        _registered.append(hook)


def _prove_after_apply(registry: Any) -> None:
    apply_hooks = registry.apply_hooks.__func__

    def apply_and_prove(cls: type) -> None:
        if cls is not registry:  # one that is derived from it has hooks of its own
            apply_hooks(cls)
            return
        try:
            replaced = [function_of(hook.target.resolve()[-1]) for hook in _registered]
            with looked_up_at_once(sys.modules[registry.__module__], replaced):
                apply_hooks(cls)
            prove()
        except MtpError as error:
            raise SystemExit(f"mamba-mtp: {error}") from error

    registry.apply_hooks = classmethod(apply_and_prove)


def prove() -> None:
    """Check that every registered row is live.

    Raises
        MtpError: one is not.
    """
    dead = [f"{hook.target.path} ({hook.kind} {hook.function.__qualname__})" for hook in _not_live(_registered)]
    if dead or not _registered:
        raise MtpError(
            "these hooks are not live, so SGLang would serve without them:\n"
            + "\n".join(f"  - {text}" for text in dead or ["none was registered"])
        )


def is_live(hook: Hook) -> bool:
    """Whether calling the surface calls our function, wherever the surface was imported to."""
    return not _not_live([hook])


def _not_live(hooks: Sequence[Hook]) -> list[Hook]:
    """Those of ``hooks`` that a call of their surface would miss."""
    found = [(hook, *hook.target.resolve()) for hook in hooks]
    imported = _known_as({name for _, owner, name, _ in found if isinstance(owner, ModuleType)})
    missed = []
    for hook, owner, name, attribute in found:
        wrapped = function_of(attribute)
        called = any(_calls(layer, hook.function) for layer in _layers(wrapped))
        if not called or (isinstance(owner, ModuleType) and id(inspect.unwrap(wrapped)) in imported[name]):
            missed.append(hook)
    return missed


def _known_as(names: set[str]) -> dict[str, set[int]]:
    """Of each name the ids of what it is in all modules that have it."""
    known: dict[str, set[int]] = {name: set() for name in names}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name in vars(module).keys() & names:
                known[name].add(id(vars(module)[name]))
    return known


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
