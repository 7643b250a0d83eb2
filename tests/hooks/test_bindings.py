"""What modules have imported of what a hook replaces is found as SGLang's own search finds it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang_mamba_mtp.hooks.bindings import Bindings, looked_up_at_once

from .test_registry import load_plugins


@pytest.fixture
def of() -> SimpleNamespace:
    """Functions that no module has but those of a test."""
    return SimpleNamespace(theirs=lambda: 1, ours=lambda: 2, outer=lambda: 3, another=lambda: 4)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """``module(name, **names)`` is a new module that is imported."""

    def make(name: str, **names: object) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


def test_every_name_but_those_of_the_source_is_given_the_new_one(module, of):
    source = module("source_of_it", f=of.ours, alias=of.theirs)
    first = module("has_imported_it", f=of.theirs, g=of.theirs, other=of.another)
    second = module("has_imported_it_too", h=of.theirs)
    unlike = module("has_not", f=of.another)
    bindings = Bindings([of.theirs])
    assert bindings.replace(of.theirs, of.ours, source) == 3
    assert first.f is first.g is second.h is of.ours and first.other is unlike.f is of.another
    assert source.f is of.ours and source.alias is of.theirs, "SGLang sets the name itself, and leaves the others"
    assert bindings.replace(of.theirs, of.ours, None) == 1 and source.alias is of.ours


def test_what_was_put_in_place_can_be_replaced(module, of):
    there = module("has_imported_it", f=of.theirs)
    bindings = Bindings([of.theirs])
    bindings.replace(of.theirs, of.ours, None)
    assert bindings.replace(of.ours, of.outer, None) == 1 and there.f is of.outer


def test_what_is_imported_while_hooks_are_applied_is_found(module, of):
    before = module("imported_before")
    bindings = Bindings([of.theirs, of.another])
    assert bindings.replace(of.another, of.ours, None) == 0
    after = module("imported_meanwhile", f=of.theirs)
    before.late = of.theirs  # as a module is given what another one defines
    assert bindings.replace(of.theirs, of.ours, None) == 2
    assert after.f is before.late is of.ours


def test_a_name_that_means_something_else_by_now_is_left(module, of):
    there = module("changes_its_mind", f=of.theirs)
    bindings = Bindings([of.theirs, of.another])
    bindings.replace(of.another, of.ours, None)
    there.f = of.outer
    assert bindings.replace(of.theirs, of.ours, None) == 0 and there.f is of.outer


def test_a_name_that_cannot_be_set_keeps_no_other_from_it(module, of, monkeypatch):
    class Closed(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    closed = Closed("closed")
    vars(closed)["f"] = of.theirs
    monkeypatch.setitem(sys.modules, "closed", closed)
    there = module("has_imported_it", f=of.theirs)
    assert Bindings([of.theirs]).replace(of.theirs, of.ours, None) == 1
    assert there.f is of.ours and closed.f is of.theirs


@pytest.mark.parametrize("first, second", [("defines_it", "exports_it"), ("exports_it", "defines_it")])
def test_a_function_that_is_hooked_where_it_is_and_where_it_is_exported_has_both_hooks(module, of, first, second):
    """As of two plugins: SGLang's registry sets the name at the hook's target itself."""
    modules = {name: module(name, f=of.theirs) for name in (first, second)}
    bindings = Bindings([of.theirs])
    for name, before, wrapped in ((first, of.theirs, of.ours), (second, of.ours, of.outer)):
        assert modules[name].f is before
        modules[name].f = wrapped
        bindings.replace(before, wrapped, modules[name])
    assert modules[first].f is modules[second].f is of.outer


def test_hooks_of_others_are_looked_up_by_sglang(module, of):
    there, asked = module("has_imported_it", f=of.theirs), []
    registry = SimpleNamespace(_propagate_patch=lambda *hook: asked.append(hook))
    search = registry._propagate_patch
    with pytest.raises(RuntimeError), looked_up_at_once(registry, [of.theirs]):
        registry._propagate_patch(of.theirs, of.ours, None)
        assert there.f is of.ours and not asked
        registry._propagate_patch(of.another, of.ours, None)
        assert asked == [(of.another, of.ours, None)]
        raise RuntimeError
    assert registry._propagate_patch is search


def test_sglangs_search_would_find_the_same(forked):
    """For every hook, in a process that has imported all that a scheduler does."""

    def body():
        replace, hooks = Bindings.replace, []

        def compared(self, old, new, source):
            everywhere = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and m is not source]
            expected = {(m.__name__, name) for m in everywhere for name, x in list(vars(m).items()) if x is old}
            assert replace(self, old, new, source) == len(expected), expected
            assert all(vars(sys.modules[name])[key] is new for name, key in expected if name in sys.modules)
            hooks.append(expected)
            return len(expected)

        Bindings.replace = compared
        load_plugins()
        print(f"hooks {len(hooks)}, of which {sum(map(bool, hooks))} were imported elsewhere")

    result = forked(body, SGLANG_MAMBA_MTP_MODE="replay")
    assert result.code == 0, result.output
    counts = [int(word) for word in result.output.rpartition("hooks ")[2].replace(",", "").split() if word.isdigit()]
    assert counts[0] > 30 and counts[1] > 0, result.output
