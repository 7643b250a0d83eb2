"""Where modules have imported what a hook replaces: ``from x import f`` keeps the f of before.

SGLang's registry looks for it in every name of every module, once a hook: some forty times through half a million
names, seconds of the start of each of a server's processes. Here all that our hooks replace is looked for at once; for
hooks of other plugins SGLang goes on looking itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

Places = list[tuple[ModuleType, str]]


class Bindings:
    """Of some objects, the modules and names that have them.

    Attributes
        known: the objects by id; kept, so that no other object gets their ids.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.known = {id(each): each for each in objects}
        self._places: dict[int, Places] = {}
        self._modules = 0  # how many there were when they were looked through

    def replace(self, old: Any, new: Any, source: Any) -> int:
        """Give every module but ``source`` that has ``old`` ``new`` in its place, and know ``new`` from now on.

        Returns how many names were given it.
        """
        self._look()
        self.known[id(new)] = new
        places = self._places.pop(id(old), [])
        theirs = [(module, name) for module, name in places if module is not source and vars(module).get(name) is old]
        given: Places = []
        for module, name in theirs:
            with contextlib.suppress(AttributeError, TypeError):  # as SGLang does
                setattr(module, name, new)
                given.append((module, name))
        self._places[id(old)] = [place for place in places if place[0] is source]
        # the hook has given the source its name; what wraps that in turn may be found there
        own = [(source, name) for name, value in vars(source).items() if value is new] if _is_module(source) else []
        self._places.setdefault(id(new), []).extend(given + own)
        return len(given)

    def _look(self) -> None:
        """Look through all modules, again if some were imported since: where a hook is applied nothing else runs that
        could give a module new names."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        found: dict[int, Places] = defaultdict(list)
        for module in filter(_is_module, list(sys.modules.values())):
            names = dict(vars(module))
            if self.known.keys().isdisjoint(map(id, names.values())):  # as nearly all are
                continue
            for name, value in names.items():
                if id(value) in self.known:
                    found[id(value)].append((module, name))
        self._places = dict(found)


def _is_module(thing: Any) -> bool:
    return isinstance(thing, ModuleType)


@contextlib.contextmanager
def looked_up_at_once(registry: Any, objects: Iterable[Any]) -> Iterator[None]:
    """While hooks are applied, find at once where ``objects`` are, which some of them replace.

    registry: the module of SGLang's registry.
    """
    bindings, search = Bindings(objects), registry._propagate_patch

    def propagate(original: Any, wrapped: Any, source_module: Any) -> int:
        look = bindings.replace if id(original) in bindings.known else search
        return look(original, wrapped, source_module)

    registry._propagate_patch = propagate
    try:
        yield
    finally:
        registry._propagate_patch = search
