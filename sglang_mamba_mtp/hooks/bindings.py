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


class Bindings:
    """Of some objects, the modules and names that have them.

    Attributes
        known: the objects by id; kept, so that no other object gets their ids.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.known = {id(each): each for each in objects}
        self._places: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        self._seen: dict[int, int] = {}  # by a module's id, how many names it had
        self._modules = 0

    def replace(self, old: Any, new: Any, source: Any) -> int:
        """Give every module but ``source`` that has ``old`` ``new`` in its place, and know ``new`` from now on.

        Returns how many names were given it.
        """
        self._look()
        places, self.known[id(new)] = self._places.pop(id(old), []), new
        found = [(module, name) for module, name in places if vars(module).get(name) is old and module is not source]
        for module, name in found:
            setattr(module, name, new)
        self._places[id(old)] = [place for place in places if place[0] is source]
        self._places[id(new)] += found
        return len(found)

    def _look(self) -> None:
        """Look through the modules that are new or have new names: code runs where a hook is applied only if applying
        it imports something."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType) or self._seen.get(id(module)) == len(vars(module)):
                continue
            names = dict(vars(module))
            self._seen[id(module)] = len(names)
            if self.known.keys().isdisjoint(map(id, names.values())):  # as nearly all are
                continue
            for name, value in names.items():
                place = (module, name)
                if id(value) in self.known and place not in self._places[id(value)]:
                    self._places[id(value)].append(place)


@contextlib.contextmanager
def looked_up_at_once(registry: Any, objects: Iterable[Any]) -> Iterator[None]:
    """While SGLang's ``registry`` applies hooks, find at once where ``objects`` are, which some of them replace."""
    bindings, search = Bindings(objects), registry._propagate_patch

    def propagate(original: Any, wrapped: Any, source_module: Any) -> int:
        # (its own search would not know that what it puts in place may be wrapped again, and need not)
        if id(original) in bindings.known:
            return bindings.replace(original, wrapped, source_module)
        return search(original, wrapped, source_module)

    registry._propagate_patch = propagate
    try:
        yield
    finally:
        registry._propagate_patch = search
