"""Run code right after a module has been imported, or now if it already has."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_waiting: dict[str, list[Callback]] = {}


class _Loader(importlib.abc.Loader):
    """Delegates to the module's own loader, then runs the callbacks waiting for it."""

    def __init__(self, inner: importlib.abc.Loader):
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self.inner
        self.inner.exec_module(module)
        for callback in _waiting.pop(module.__name__, []):
            callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once the module called `name` is complete; at once if it is already imported."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _waiting.setdefault(name, []).append(callback)


def rebind(old: object, new: object, prefix: str = "sglang.") -> None:
    """Point every module global that holds `old` (a `from x import y` of it) at `new`."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefix) or module is None:
            continue
        names = dict(vars(module))
        if id(old) in map(id, names.values()):  # few have it, and asking all of them takes a server's start long
            for key, value in names.items():
                if value is old:
                    setattr(module, key, new)


def while_calling(module: str, **answers: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace names of ``module`` while a function of it runs: it asks for the platform in its own body."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            asked = sys.modules[module]
            keep = {name: getattr(asked, name) for name in answers}
            try:
                for name, answer in answers.items():
                    setattr(asked, name, answer)
                return function(*args, **kwargs)
            finally:
                for name, value in keep.items():
                    setattr(asked, name, value)

        return call

    return around
