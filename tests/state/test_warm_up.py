"""What is launched before a server is ready: everything a step launches outside its graphs, on padding alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_mamba_mtp.state.store import INDEX_DTYPES, WARM_SIZES

LENGTHS = (1, 4)

EXPECTED = {
    "replay": {"build_tree", "plan_rows", "commit_window", "commit_conv", "fold", "fold_conv", "move_states"},
    "slots": {"build_tree", "place_nodes", "commit_slots", "newest_slots", "forget_inputs", "move_states"},
}


class Calls(list):
    """Calls of ops: the op's name, and the tensors of its arguments that hold slots."""

    def record(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            parts = [vars(argument) for argument in args if dataclasses.is_dataclass(argument)]
            named = {key: value for part in (*parts, kwargs) for key, value in part.items()}
            self.append(
                (name, {key: value for key, value in named.items() if key.endswith("slots") or key in ("src", "dst")})
            )
            return op(*args, **kwargs)

        return run

    def watch(self, pool: Any) -> None:
        """Record what the pool's store and axis orders call from now on."""
        for owner, name in ((pool.store, "_common"), (pool.store, "_conv"), (pool.axis_orders, "_ops"), (pool, "_ops")):
            ops = getattr(owner, name)
            setattr(owner, name, type(ops)(*(self.record(*op) for op in zip(ops._fields, ops, strict=True))))
        if hasattr(pool.store, "_fold"):
            pool.store._fold = self.record("fold", pool.store._fold)

    def names(self) -> set[str]:
        return {name for name, _ in self}


@pytest.fixture(params=list(itertools.product(EXPECTED, ("gdn", "mamba2"), ("vk", "kv"))), ids="-".join)
def opened(sglang, request, monkeypatch):
    """A mode's name and its pool, with room for the sizes that are warmed up."""
    from tests.stateful import naive, test_lives

    mode, family, layout = request.param
    monkeypatch.setattr(test_lives, "PADDING", max(WARM_SIZES))
    model = naive.MODELS[family](naive.Sizes(), torch.Generator().manual_seed(0))
    make = {
        "replay": lambda: test_lives.replay_pool(model, 8, layout),
        "slots": lambda: test_lives.slots_pool(model, layout),
    }
    return mode, layout, family, make[mode]()


def contents(pool) -> list[torch.Tensor]:
    """All that a warm-up must leave alone; slot 0 is nobody's."""
    slots = (pool.mamba_cache.temporal[:, 1:], pool.mamba_cache.conv[0][:, 1:], pool.axis_orders.bits[1:])
    return [tensor.clone() for tensor in (*slots, *pool.store.bookkeeping, *getattr(pool.store, "fields", {}).values())]


@pytest.mark.parametrize("tracked", [False, True])
def test_everything_on_padding_alone(opened, tracked):
    mode, layout, _, pool = opened
    pool.mamba_cache.temporal.normal_()
    pool.mamba_cache.conv[0].normal_()
    before, calls = contents(pool), Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=tracked)

    expected = EXPECTED[mode] | ({"turn_states"} if layout == "kv" else set())
    assert calls.names() == expected
    for name, slots in calls:
        for argument, tensor in slots.items():
            if tensor is not None:
                assert int(tensor.max()) <= 0, f"{name}: {argument} {tensor.tolist()}"
    for now, then in zip(contents(pool), before, strict=True):
        assert torch.equal(now, then)


def test_the_halves_of_a_commit_follow_one_another(opened):
    """The convolution's half starts while the window's runs: it may, since that has waited for all before it."""
    mode, *_, pool = opened
    calls = Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=True)
    names = [name for name, _ in calls]
    before = {names[at - 1] for at, name in enumerate(names) if name == "commit_conv"}
    assert before == ({"commit_window"} if mode == "replay" else set())


def test_sizes_and_dtypes(opened):
    """Whoever hands over slots does so in every dtype, for each of the sizes that are compiled apart."""
    mode, *_, pool = opened
    calls = Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=True)
    settles = {"replay": ("fold", "src"), "slots": ("newest_slots", "slots")}[mode]
    seen = {(slots[settles[1]].shape[0], slots[settles[1]].dtype) for name, slots in calls if name == settles[0]}
    assert seen == set(itertools.product(WARM_SIZES, INDEX_DTYPES))


@pytest.mark.parametrize("longest, ordered", [(4096, True), (4097, False)])
def test_rows_start_as_they_lie_where_one_program_cannot_sort_them(sglang, monkeypatch, longest, ordered):
    from tests.stateful import naive, test_lives

    monkeypatch.setattr(test_lives, "PADDING", longest - test_lives.ROWS)
    model = naive.MODELS["gdn"](naive.Sizes(), torch.Generator().manual_seed(0))
    pool, calls = test_lives.replay_pool(model, 8, "vk"), Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=False)
    assert (pool.store.schedule is not None) == ordered
    assert "plan_rows" in calls.names()
    assert pool.store.nbytes > 0


def test_a_pool_without_speculation_has_nothing_to_warm_up(sglang):
    from sglang_mamba_mtp.state.pools import ReplayPool
    from tests.stateful import test_lives

    pool = test_lives._build(ReplayPool, "vk")
    pool.warm_up(LENGTHS, tracked=True)
    assert pool.store is None
